"""Break one line of the package at a time; the test named beside it must fail.

Each mutant is applied to a copy of the checkout, in which its test is run. Lines are appended as by
the other campaigns; mutants whose line is there are skipped, unless the code has changed.

  python -m tests.faults.mutants
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import ROOT, provenance

OUTPUT = RESULTS / "mutants.jsonl"
TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault of the code.

    Attributes:
        name: what the fault does.
        file: in ``megatron_deberta/``.
        old: text that occurs once in the file.
        new: its replacement.
        test: in ``tests/``; fails with the fault, and passes without.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def code(self) -> str:
        """Return a digest of the file and its test."""
        places = (f"megatron_deberta/{self.file}", f"tests/{self.test.split('::')[0]}")
        return code_digest(places, imports=False)

    def apply(self, root: Path) -> None:
        """Change the file in a checkout."""
        path = root / "megatron_deberta" / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.name}: {text.count(self.old)} places"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


_ORDER = "unit/checkpoint/test_writer.py::test_save_flushes_before_each_rename"
_STEP = "unit/train/test_step.py"
MUTANTS = (
    Mutant(
        "every rank verifies the share of rank 0", "checkpoint/store.py",
        "share=groups.rank, num_shares", "share=0, num_shares",
        "unit/checkpoint/test_store.py::test_every_file_is_in_the_share_of_one_rank",
    ),
    Mutant(
        "tensor files are not flushed", "checkpoint/writer.py",
        "        os.fsync(stream.fileno())\n", "", _ORDER,
    ),
    Mutant(
        "the staging folder is not flushed", "checkpoint/writer.py",
        "    fsync_path(staging)\n", "", _ORDER,
    ),
    Mutant(
        "the committed folder is not flushed", "checkpoint/writer.py",
        "/ COMMITTED_FILE)\n    fsync_path(final)\n", "/ COMMITTED_FILE)\n", _ORDER,
    ),
    Mutant(
        "the folder of checkpoints is not flushed", "checkpoint/writer.py",
        "    staging.rename(final)\n    fsync_path(final.parent)\n",
        "    staging.rename(final)\n", _ORDER,
    ),
    Mutant(
        "the folder of an atomically written file is not flushed", "files.py",
        "        fsync_path(Path(final).parent)\n", "        pass\n",
        "unit/test_files.py::test_atomic_write_flushes_before_and_after_the_rename",
    ),
    Mutant(
        "the sample log is not flushed", "data/sample_log.py",
        "        os.fsync(self._stream.fileno())\n", "        return\n",
        "unit/data/test_sample_log.py::test_records_are_flushed",
    ),
    Mutant(
        "the name of a new sample log is not flushed", "data/sample_log.py",
        "                fsync_path(folder)\n", "                pass\n",
        "unit/data/test_sample_log.py::test_records_are_flushed",
    ),
    Mutant(
        "replicas are not compared before a save", "train/trainer.py",
        "            self.check_replicas()\n        identity", "            pass\n        identity",
        "unit/train/test_callbacks.py::test_replicas_are_compared_before_a_save",
    ),
    Mutant(
        "dropout ignores its site", "model/dropout.py",
        "self.step, site, self.decoder_pass", "self.step, 0, self.decoder_pass",
        "unit/model/test_dropout.py::test_dropped_elements_depend_on_every_key",
    ),
    Mutant(
        "dropout ignores the step", "model/dropout.py",
        "self.run_seed, self.step, site, self.decoder_pass",
        "self.run_seed, 0, site, self.decoder_pass",
        "unit/model/test_dropout.py::test_dropped_elements_depend_on_every_key",
    ),
    Mutant(
        "the position-to-content term is subtracted", "ops/reference.py",
        'yield "p2c", by_slot.gather(-1, slots)', 'yield "p2c", -by_slot.gather(-1, slots)',
        "unit/ops/test_reference.py::test_reference_is_the_definition",
    ),
    Mutant(
        "released and paper's index of that term are swapped", "ops/reference.py",
        'a.p2c_index == "microsoft"', 'a.p2c_index != "microsoft"',
        "unit/ops/test_reference.py::test_reference_is_the_definition",
    ),
    Mutant(
        "padding is visible", "ops/arguments.py",
        "    if a.attention_mask is not None:\n", "    if False:\n",
        "unit/ops/test_attention.py",
    ),
    Mutant(
        "SHA-256 of tensor files is not compared", "checkpoint/reader.py",
        "if digest != entry.sha256:", "if False:",
        "unit/checkpoint/test_store.py::test_every_file_is_in_the_share_of_one_rank",
    ),
    Mutant(
        "biases and norms are decayed", "engine/optimizer.py",
        '"weight_decay": 0.0 if is_exempt else weight_decay,', '"weight_decay": weight_decay,',
        "unit/engine/test_optimizer.py::test_groups_keep_the_order_and_leave_frozen_parameters_out",
    ),
    Mutant(
        "the sampler is off by one", "data/loader.py",
        "begin = first_sample + self.dp_rank * share",
        "begin = first_sample + self.dp_rank * share + 1",
        "unit/data/test_resume_cuts.py::test_cuts",
    ),
    Mutant(
        "all data-parallel ranks read the samples of rank 0", "data/loader.py",
        "begin = first_sample + self.dp_rank * share", "begin = first_sample",
        "unit/data/test_resume_cuts.py::test_cuts",
    ),
    Mutant(
        "the loss ignores the number of ranks", "train/step.py",
        "(groups.dp_size / num_targets[name])", "(1 / num_targets[name])",
        f"{_STEP}::test_the_sum_of_all_ranks_is_divided_by_the_targets_of_all_ranks",
    ),
    Mutant(
        "the loss is divided by this rank's targets", "train/step.py",
        "        total = sum_over_batch_ranks(total, self._groups)\n", "",
        f"{_STEP}::test_the_sum_of_all_ranks_is_divided_by_the_targets_of_all_ranks",
    ),
    Mutant(
        "the loss is divided by the targets of the first micro batch", "train/step.py",
        "torch.stack(rows).sum(0)", "torch.stack(rows)[0]",
        f"{_STEP}::test_micro_batches_with_unequal_targets_change_nothing",
    ),
    Mutant(
        "the lock of a job folder is ignored", "files.py",
        "        except BlockingIOError:\n            self.release()\n            return False",
        "        except BlockingIOError:\n            pass",
        "unit/text/jobs/test_job_folder.py",
    ),
    Mutant(
        "the warm-up begins at a rate of 0", "engine/schedule.py",
        "peak * (step + 1) / warmup", "peak * step / warmup", "unit/engine/test_schedule.py",
    ),
    Mutant(
        "an overflow does not lower the loss scale", "engine/schedule.py",
        "            self._shrink()\n", "", "unit/engine/test_schedule.py",
    ),
    Mutant(
        "retention deletes the target of a rollback", "checkpoint/retention.py",
        "kept = {*steps[-self.keep_last :], *good[-1:], ", "kept = {*steps[-self.keep_last :], ",
        "unit/checkpoint/test_retention.py",
    ),
    Mutant(
        "random tokens take the place of [MASK]", "data/masking.py",
        "self._vocabulary.mask_id, unmasked)", "random_tokens, unmasked)",
        "unit/data/test_masking.py::test_eighty_ten_ten",
    ),
    Mutant(
        "a rollback repeats the data", "train/stability/rollback.py",
        "return TrainState(saved.step, last.consumed_samples), _guard_after(reader, last)",
        "return TrainState(saved.step, saved.consumed_samples), _guard_after(reader, last)",
        "distributed/test_roll_back.py",
    ),
    Mutant(
        "in RTD a drawn original counts as replaced", "objectives/rtd.py",
        "input_ids != fill(masked, positions, batch.labels)",
        "fill(torch.zeros_like(input_ids), positions, torch.ones_like(samples)) > 0",
        "unit/train/test_rtd_steps.py::test_a_drawn_original_is_not_replaced",
    ),
    Mutant(
        "generator and discriminator share dropout bits", "objectives/rtd.py",
        "run_seed=seeds.run_seed ^ _DISCRIMINATOR", "run_seed=seeds.run_seed",
        "unit/train/test_rtd_steps.py::test_both_models_have_dropout_bits_of_their_own",
    ),
    Mutant(
        "SiFT's two passes share dropout bits", "objectives/sift.py",
        'site_id("sift.second"))', 'site_id("sift.first"))',
        "unit/model/test_dropout.py::test_the_passes_of_sift_have_dropout_bits_of_their_own",
    ),
    Mutant(
        "an ensemble takes the worst runs", "evaluate/outputs.py",
        "key=lambda pair: -pair[0]", "key=lambda pair: pair[0]",
        "unit/evaluate/test_outputs.py::test_an_ensemble_takes_the_best_runs",
    ),
    Mutant(
        "outputs of another data set are reused", "evaluate/outputs.py",
        '!= (weights, data):', '!= (weights, kept["data"]):',
        "unit/evaluate/test_outputs.py::test_outputs_under_the_name_of_other_ones_are_not_used",
    ),
    Mutant(
        "a blend's index range is without its margin", "data/dataset/blend.py",
        "max(0, share * begin // self.period - 1), share * end // self.period + 2",
        "share * begin // self.period, share * end // self.period",
        "unit/data/test_blend.py::test_the_rows_of_a_range_are_in_its_parts",
    ),
    Mutant(
        "outputs of other weights are reused", "evaluate/outputs.py",
        '!= (weights, data):', '!= (kept["weights"], data):',
        "unit/evaluate/test_outputs.py::test_outputs_under_the_name_of_other_ones_are_not_used",
    ),
    Mutant(
        "altered outputs are used", "evaluate/outputs.py",
        'if hashlib.sha256(content).hexdigest() != kept["sha256"]:', "if False:",
        "unit/evaluate/test_outputs.py::test_damaged_outputs_are_computed_again",
    ),
    Mutant(
        "a run without its last validation has finished", "evaluate/outputs.py",
        "if found is None or not found.has_ended or found.last not in found.validations:",
        "if found is None or not found.has_ended:",
        "unit/evaluate/test_outputs.py::test_a_run_has_finished_when_its_last_validation_is_recorded",
    ),
    Mutant(
        "a checkpoint that was not saved is the best", "evaluate/selection.py",
        "            self.unsaved[step] = score\n",
        "            self.best_step, self.best_score = step, score\n",
        "unit/evaluate/test_selection.py::test_only_a_saved_checkpoint_is_the_best",
    ),
    Mutant(
        "a deleted checkpoint stays the best", "evaluate/selection.py",
        'and _is_committed(run_dir, best["step"]):', "and True:",
        "unit/evaluate/test_selection.py::test_a_best_validation_without_a_checkpoint_selects_nothing",
    ),
    Mutant(
        "a validation of train.exit_step selects", "train/callbacks.py",
        "if self._is_due(trainer) or step == trainer.config.train.steps:", "if True:",
        "unit/train/test_callbacks.py::test_a_validation_of_exit_step_selects_nothing",
    ),
    Mutant(
        "encoded examples are not compared with their fingerprint", "tasks/encoded.py",
        "if loaded.fingerprint != recorded:", "if False:",
        "unit/tasks/test_encoding.py::test_a_flipped_bit_of_the_cache_is_found",
    ),
    Mutant(
        "a damaged local checkpoint is used", "checkpoint/local/parts.py",
        "sha256_file(path / entry.name) == entry.sha256 for", "(path / entry.name).exists() for",
        "unit/checkpoint/test_local.py::test_part_is_held_once_committed",
    ),
    Mutant(
        "a local checkpoint outlives a rollback", "checkpoint/local/recovery.py",
        "return save.step <= min(later, default=save.step)", "return True",
        "unit/checkpoint/test_local.py::test_rollback_voids_all_saves",
    ),
    Mutant(
        "a moving average is that of the last weights", "engine/base.py",
        "1 - self._ema_decay)", "self._ema_decay)",
        "distributed/test_engine_average.py",
    ),
    Mutant(
        "an export of the moving average has the weights", "checkpoint/views.py",
        "EMA if kind == WEIGHT else kind", "kind",
        "unit/checkpoint/test_views.py::test_moving_average_is_saved_and_loaded_on_any_layout",
    ),
    Mutant(
        "packed rows begin where the one before does", "evaluate/splits.py",
        "starts[counts.cumsum() - counts][of]", "starts",
        "unit/evaluate/test_splits.py::test_each_row_begins_at_its_place",
    ),
    Mutant(
        "documents are packed without the separators between them", "data/dataset/packing.py",
        "self._corpus.lengths[part] + 1,", "self._corpus.lengths[part] + 0,",
        "unit/data/test_packing.py::test_full_sentences_are_the_shuffled_documents_end_to_end",
    ),
    Mutant(
        "a blend repeats its rows in every period", "data/dataset/blend.py",
        "blocks * np.array(self._shares)[components] + table.local[slots]", "table.local[slots]",
        "unit/data/test_blend.py::test_decimals_repeat_exactly_and_far_indices_are_found_at_once",
    ),
    Mutant(
        "a card has the figures of the last validation, of whichever step",
        "report/training_facts.py",
        'if _is_validation(record) and record["step"] == step:', "if _is_validation(record):",
        "integration/test_model_cards.py::test_a_step_without_validation_has_no_figures",
    ),
)  # fmt: skip


def copy_checkout(target: Path) -> None:
    """Copy what tests need."""
    for name in ("megatron_deberta", "tests", "benchmarks", "configs", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, target / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", target)


def run_test(root: Path, test: str) -> bool:
    """Return whether a test of a checkout passes."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [*command, f"tests/{test}"], cwd=root, capture_output=True, timeout=TIMEOUT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test}: {done.stdout.decode()[-1000:]}")
    return done.returncode == 0


def run_mutant(mutant: Mutant) -> dict[str, Any]:
    """Run a mutant's test without and with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_checkout(root)
        passes = run_test(root, mutant.test)
        mutant.apply(root)
        killed = not run_test(root, mutant.test)
    ok = passes and killed
    return {"mutant": mutant.name, "file": mutant.file, "test": mutant.test, "ok": ok}


def main() -> int:
    """Run the missing mutants; return 0 if all were killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    done = {(line["mutant"], line["code_digest"]): line["ok"] for line in read_lines(args.output)}
    survivors = 0
    for mutant in MUTANTS:
        if (known := done.get((mutant.name, mutant.code()))) is not None:
            survivors += not known
            continue
        line = run_mutant(mutant) | {"code_digest": mutant.code()} | provenance()
        append_line(args.output, line)
        survivors += not line["ok"]
        print(f"{mutant.name}: {'killed' if line['ok'] else 'SURVIVED'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
