"""Tables of published models: speed of each form by shape, and decisions of the ONNX formats."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.common import NOTHING, UNMEASURED, Result, markdown, place

_FORMS = {
    "stock": "`transformers`", "stock_compiled": "`transformers`, `torch.compile`",
    "fast": "`use_fast_attention`", "fast_compiled": "`use_fast_attention`, `torch.compile`",
    "torch_onnx": "torch's ONNX export", "onnx_fp32": "our ONNX, fp32",
    "onnx_fp16": "our ONNX, fp16", "onnx_int8": "our ONNX, int8",
    "products": "fp32 products with weights alone",
}  # fmt: skip
_USES = (
    ("classifier: NLI, sentiment, guard model; one or several labels, or a score",
     "`use_fast_attention(model)`",
     "`convert --from hf DIR --to onnx --dtype int8 --texts FILE`",
     "`predict --model DIR --text ...`"),
    ("reranker (one score for a pair)", "the same", "the same",
     "`predict --model DIR --text QUERY --text-pair PASSAGE`"),
    ("tagger", "the same", "the same",
     '`predict --model DIR --text "words separated by spaces"`'),
    ("question answering", "the same", "the same",
     "`predict --model DIR --text QUESTION --text-pair PASSAGE`"),
    ("multiple choice", "the same", "the same, without `--texts`",
     "`predict TASK --model DIR --data DATA`"),
    ("embeddings, sentence-transformers", "`use_fast_attention(model)` on the module",
     "`convert --from hf DIR --to onnx --encoder`", ""),
    ("GLiNER", "the same", "", ""),
    ("masked language model", "the same", "`convert --from hf DIR --to onnx`",
     "`fill-mask` ([below](#which-releases-fill-masks))"),
)  # fmt: skip
"""Model, PyTorch, ONNX, command line."""


def uses(record: Result) -> str:
    """What to call for each kind of model, with the measured factors."""
    rows = record.get("speed", [])

    def factors(*forms: str) -> str:
        found = [_ratio(row, "stock", form) for row in rows for form in forms if _has(row, form)]
        return f"{min(found):.1f} to {max(found):.1f}x" if found else UNMEASURED

    torch, fp32, int8 = factors("fast"), factors("onnx_fp32"), factors("onnx_int8")
    header = ("your model", "in PyTorch", "times as fast", "as ONNX",
              "times as fast: fp32, int8", "ids and scores from the command line")  # fmt: skip
    cells = []
    for number, (model, in_torch, onnx, command) in enumerate(_USES):
        measured = (torch, f"{fp32}, {int8}") if number == 0 else ("", "")
        cells.append((model, in_torch, measured[0], onnx, measured[1], command))
    return markdown(header, cells)


def speed(record: Result) -> str:
    """Milliseconds and factors of every form by shape."""
    rows = record.get("speed", [])
    if not rows:
        return NOTHING
    header = ("form", *(f"B{row['batch']}, N={row['length']}" for row in rows), "compilation, s")
    cells = []
    for form, title in _FORMS.items():
        values = [
            f"{row['cpu_seconds'][form] * 1e3:,.0f} ms, {_ratio(row, 'stock', form):.2f}x"
            if _has(row, form) else "not run"
            for row in rows
        ]  # fmt: skip
        seconds = [row["compile_seconds"].get(form) for row in rows]
        known = [value for value in seconds if value is not None]
        cells.append((title, *values, f"{min(known):.0f} to {max(known):.0f}" if known else ""))
    notes = {f"{_FORMS[k]}: {why}" for row in rows for k, why in row["skipped"].items()}
    worst = max(
        value for row in rows for form, value in row["difference"].items()
        if form not in ("onnx_fp16", "onnx_int8")
    )  # fmt: skip
    peers = [_ratio(row, "torch_onnx", "onnx_fp32") for row in rows if _has(row, "torch_onnx")]
    against = (
        f" fp32 over torch's ONNX export: {min(peers):.2f} to {max(peers):.2f}x." if peers else ""
    )
    loads = [row["provenance"]["load"] for row in rows]
    where = dict(rows[-1]["provenance"]) | {"load": f"{min(loads)} to {max(loads)}"}
    return (
        markdown(header, cells)
        + f"\nProcessor time and factor over `transformers`.{against} Largest difference of logits "
        f"in fp32: {worst:.1e}.\n"
        + "".join(f"\nNot run: {note}.\n" for note in sorted(notes))
        + f"\nShape of DeBERTa-v3-{rows[0]['size']}, {rows[0]['layers']} layers, random weights, "
        "1 thread.\n" + place(where)
    )  # fmt: skip


def decisions(record: Result) -> str:
    """Accuracy, equal decisions and speed of the formats on SST-2."""
    found = record.get("decisions")
    if not found:
        return NOTHING
    header = ("form", "accuracy", "decisions as fp32", "MB", "s for all", "times as fast")
    cells = [
        (
            _FORMS[form], f"{accuracy:.2%}",
            f"{found['same_as_fp32'][form]} of {found['sentences']}",
            f"{found['bytes'][form] / 1e6:.1f}" if form in found["bytes"] else "",
            f"{found['cpu_seconds'][form]:.2f}", f"{_ratio(found, 'stock', form):.2f}x",
        )
        for form, accuracy in found["accuracy"].items()
    ]  # fmt: skip
    layers = (found["report"] or {}).get("fp32_layers", [])
    kept = f"layers {', '.join(map(str, layers))}" if layers else "no layer"
    model = found["model"]
    note = (
        f"\n{model['num_hidden_layers']} layers of {model['hidden_size']}, trained here on SST-2; "
        f"{found['sentences']} dev sentences, 1 thread, processor time; in the int8 graph, {kept} "
        "in fp32.\n"
    )
    return markdown(header, cells) + note + place(found["provenance"])


def _has(row: Result, form: str) -> bool:
    return form in row["cpu_seconds"]


def _ratio(row: Result, slower: str, faster: str) -> float:
    times: dict[str, Any] = row["cpu_seconds"]
    return float(times[slower] / times[faster])
