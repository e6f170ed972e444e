"""The models as a library: construction, initialisation, dropout, a plain training loop."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_deberta import DebertaConfig, DebertaForMaskedLM, DebertaModel
from megatron_deberta.config.schema import Head
from megatron_deberta.data.batch import Batch
from megatron_deberta.errors import ConfigError, MegatronDebertaError
from megatron_deberta.hf import modeling_megatron_deberta as exported
from megatron_deberta.model import RuntimeOptions, task_model
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.objectives import MaskedLanguageModel
from tests.support.tiny_models import V2

CONFIG = replace(V2, num_layers=2, vocab_size=67, max_position_embeddings=32)
IDS = torch.randint(4, 67, (2, 12), generator=torch.Generator().manual_seed(0))
EXPORTED = exported.MegatronDebertaConfig(
    vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=64, type_vocab_size=2,
    relative_attention=False, position_biased_input=True, absolute_positions="input",
    mask_decoder_passes=0, cls_dropout=0.0, num_labels=2, pooler_hidden_size=32,
)  # fmt: skip


def test_importing_the_package_imports_neither_torch_nor_the_model() -> None:
    code = "import sys, megatron_deberta; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("model_class", [DebertaModel, DebertaForMaskedLM, MaskedLanguageModel])
def test_weights_are_initialised_at_construction(model_class: type[DebertaModel]) -> None:
    model = model_class(CONFIG, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name


def test_the_seed_of_the_weights_is_explicit_or_torchs() -> None:
    def weights(manual_seed: int, seed: int | None = None) -> torch.Tensor:
        torch.manual_seed(manual_seed)
        return DebertaModel(CONFIG, seed=seed).embeddings.token.weight.detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(weights(1, seed=5), weights(2, seed=5))
    model = DebertaModel(CONFIG)
    model.init_weights(5)
    assert torch.equal(model.embeddings.token.weight, weights(0, seed=5))


def test_the_encoder_and_the_pretraining_model_share_initial_weights() -> None:
    encoder, whole = DebertaModel(CONFIG, seed=1), DebertaForMaskedLM(CONFIG, seed=1)
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


def test_the_meta_device_is_left_uninitialised() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = DebertaForMaskedLM(CONFIG)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_contradictory_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_heads=5 does not divide model.hidden_size=32"):
        DebertaModel(DebertaConfig(hidden_size=32, num_heads=5))


def test_a_misspelt_setting_names_the_right_one() -> None:
    with pytest.raises(TypeError, match=r"^DebertaConfig has no setting hiden_size; did you mean "
                       r"hidden_size\?$"):  # fmt: skip
        DebertaConfig(hiden_size=32)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^DebertaConfig has no setting xyz; it has num_layers, "):
        DebertaConfig(xyz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes settings by name"):
        DebertaConfig(12)  # type: ignore[misc]
    assert copy.deepcopy(CONFIG) == copy.copy(CONFIG) == replace(CONFIG) == CONFIG


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"input_ids": IDS[0]}, r"input_ids: got shape \[12\], expected \[batch, tokens\]"),
        ({"input_ids": IDS + 67}, "input_ids: got [0-9]+, expected 0 to 66: 67 rows of vocab_size"),
        ({"input_ids": IDS.float()}, "input_ids: got torch.float32, expected a tensor of int64"),
        ({"input_ids": IDS.tolist()}, "input_ids: got list, expected a tensor of int64"),
        ({"input_ids": IDS[:, :0]}, "input_ids: got rows without tokens"),
        ({"attention_mask": torch.full((2, 12), 0.5)}, "attention_mask: got 0.5, expected values"),
        ({"attention_mask": torch.full((2, 12), torch.nan)}, "attention_mask: got nan"),
        ({"input_ids": IDS - 99}, "input_ids: got -[0-9]+, expected 0 to 66"),
        (
            {"input_ids": torch.ones(1, 99).long()},
            "rows of 99 tokens, but the model has [0-9]+ pos",
        ),
        ({"attention_mask": torch.ones(2, 11)}, r"attention_mask: got shape \[2, 11\]"),
        ({"attention_mask": torch.full((2, 12), -1e4)}, "attention_mask: got -10000.0"),
        ({"token_type_ids": torch.ones(2, 1).long()}, "token_type_ids: got shape"),
        ({"token_type_ids": torch.full((2, 12), 2)}, "token_type_ids: got 2, expected 0 to 1"),
        ({"position_ids": torch.full((2, 12), 512)}, "position_ids: got 512"),
        ({"labels": torch.full((2, 12), 67)}, "labels: got 67, expected 0 to 66"),
        ({"labels": torch.full((2, 12), -1)}, "labels: got -1"),
    ],
)
def test_inputs_out_of_range_are_named(inputs: dict[str, torch.Tensor], said: str) -> None:
    config = replace(
        CONFIG, absolute_positions="input", type_vocab_size=2, max_position_embeddings=64
    )
    with pytest.raises(ValueError, match=said) as error:
        DebertaForMaskedLM(config).eval()(**{"input_ids": IDS, **inputs})
    assert isinstance(error.value, MegatronDebertaError)
    if "labels" in inputs:
        return
    with pytest.raises(ValueError, match=said):
        DebertaModel(config).eval()(**{"input_ids": IDS, **inputs})
    heads: dict[Head, tuple[str, ...]] = {
        "classification": ("a", "b"),
        "tokens": ("a",),
        "spans": (),
    }
    for head, labels in heads.items():
        of_task = replace(config, head=head, labels=labels, mask_decoder_passes=0)
        model = task_model(of_task)(of_task).eval()
        with pytest.raises(ValueError, match=said):
            model.logits(ModelInputs(**{"input_ids": IDS, **inputs}))
        # A rank may have no rows of the last batch.
        assert len(model.logits(ModelInputs(IDS[:0]))) == 0


def test_masks_of_integers_and_no_mask() -> None:
    model = DebertaModel(CONFIG).eval()
    ones = torch.ones_like(IDS)
    expected = model(IDS).last_hidden_state
    assert expected.shape == (2, 12, 32)
    assert torch.equal(model(IDS, ones).last_hidden_state, expected)
    assert torch.equal(model(IDS, ones.bool()).last_hidden_state, expected)


def test_loss_and_logits_agree_with_the_pretraining_objective() -> None:
    model = DebertaForMaskedLM(CONFIG, seed=2).eval()
    objective = MaskedLanguageModel(CONFIG, seed=2).eval()
    positions = torch.tensor([[1, 4], [3, 7]])
    targets = IDS.gather(1, positions)
    labels = torch.full_like(IDS, -100).scatter(1, positions, targets)
    out = model(IDS, labels=labels)
    assert out.logits.shape == (2, 12, 67)
    assert model(IDS).loss is None
    batch = Batch(ModelInputs(IDS), positions, targets, torch.arange(2))
    total = objective(batch).losses["masked"].loss
    torch.testing.assert_close(out.loss, total / 4)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_dropout_follows_the_mode_and_torchs_generator(recompute: str) -> None:
    model = DebertaModel(CONFIG, RuntimeOptions(recompute=recompute), seed=1)  # type: ignore[arg-type]

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        out = model(IDS).last_hidden_state
        model.zero_grad()
        out.square().sum().backward()
        return out, model.embeddings.token.weight.grad.clone()

    first = run(1)
    torch.testing.assert_close(first, run(1), rtol=0, atol=0)
    assert not torch.equal(first[0], run(2)[0])
    torch.manual_seed(1)
    assert not torch.equal(model(IDS).last_hidden_state, model(IDS).last_hidden_state)
    model.eval()
    assert torch.equal(model(IDS).last_hidden_state, model(IDS).last_hidden_state)


def test_recomputing_the_whole_model_drops_the_same_elements() -> None:
    """An outer torch.utils.checkpoint restores the generator that the key is drawn from."""
    model = DebertaModel(CONFIG, seed=1)
    gradients = []
    for outer in (False, True):
        torch.manual_seed(4)
        model.zero_grad()
        out = checkpoint(model, IDS, use_reentrant=False) if outer else model(IDS)
        out.last_hidden_state.square().sum().backward()
        gradients.append(model.embeddings.token.weight.grad.clone())
    assert torch.equal(*gradients)


def test_a_plain_loop_trains() -> None:
    torch.manual_seed(0)
    model = DebertaForMaskedLM(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"input_ids": IDS + 67}, "input_ids: got [0-9]+, expected 0 to 66"),
        ({"input_ids": IDS - 99}, "input_ids: got -[0-9]+, expected 0 to 66"),
        ({"input_ids": IDS[0]}, r"input_ids: got \[12\]"),
        ({"input_ids": IDS.float()}, "input_ids: got torch.float32"),
        ({"input_ids": torch.ones(1, 99).long()}, "rows of 99 tokens, but the model has 64 pos"),
        ({"attention_mask": torch.ones(2, 11).long()}, r"attention_mask: got shape \[2, 11\]"),
        ({"token_type_ids": torch.full((2, 12), 2)}, "token_type_ids: got 2, expected 0 to 1"),
    ],
)
def test_inputs_of_exported_models_are_checked(inputs: dict[str, torch.Tensor], said: str) -> None:
    for model in (
        exported.MegatronDebertaModel(EXPORTED),
        exported.MegatronDebertaForMaskedLM(EXPORTED),
        exported.MegatronDebertaForTokenClassification(EXPORTED),
        exported.MegatronDebertaForCausalLM(EXPORTED),
    ):
        with pytest.raises(ValueError, match=said):
            model.eval()(**{"input_ids": IDS, **inputs})
        model(IDS, torch.ones_like(IDS))
    with pytest.raises(ValueError, match="labels: got 67, expected 0 to 66"):
        exported.MegatronDebertaForMaskedLM(EXPORTED)(IDS, labels=torch.full((2, 12), 67))


def test_checks_of_inputs_wait_for_no_device() -> None:
    """Tensors on the meta device have no values, so that reading one fails."""
    ids = IDS.to("meta")
    own = replace(
        CONFIG, head="tokens", labels=("a", "b"), absolute_positions="none", mask_decoder_passes=0
    )
    with torch.device("meta"):
        assert task_model(own)(own).eval().logits(ModelInputs(ids, ids.bool())).shape == (2, 12, 2)
    model = exported.MegatronDebertaForMaskedLM(EXPORTED).to("meta").eval()
    assert model(ids, ids, token_type_ids=ids, labels=ids).logits.shape == (2, 12, 67)
