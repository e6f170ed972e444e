"""`kernels` loads the built folder where this package cannot be imported; a stock model uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, TIMEOUT
from tests.support.judges import package_folder, record, run_program, version

pytestmark = pytest.mark.slow
PACKAGES = ("kernels==0.17.2", "tomlkit==0.13.3")
PROGRAM = """
import json, sys
from pathlib import Path

sys.modules["megatron_deberta"] = None  # any import of the package fails
import kernels, torch, transformers

loaded = kernels.get_local_kernel(Path(sys.argv[1]))
torch.manual_seed(1)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
config = transformers.DebertaV2Config(
    **sizes, vocab_size=50, relative_attention=True, pos_att_type=["c2p", "p2c"],
    position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, num_labels=3, pooler_hidden_size=32, pooler_dropout=0.0,
)
model = transformers.DebertaV2ForSequenceClassification(config)
start = {name: value.clone() for name, value in model.state_dict().items()}
ids = torch.randint(1, 50, (4, 11))
mask = (torch.arange(11) < torch.tensor([[11], [7], [3], [9]])).long()
labels = torch.tensor([0, 2, 1, 1])

def run():
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = model.train()(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=mask).logits
    return [torch.stack(losses), logits, *gradients]

stock = run()
handle = loaded.use_fast_attention(model)
names = {type(module).__module__.split(".")[0] for module in handle.modules}
ours = run()
assert names == {loaded.__name__}, names
worst = max((a - b).abs().max().item() for a, b in zip(stock, ours, strict=True))
q = torch.randn(1, 2, 5, 8)
assert loaded.disentangled_attention(
    q, q, q, None, None, loaded.RelativePositions()
).shape == q.shape
print(json.dumps({"worst": worst, "modules": len(handle.modules)}))
"""


def test_a_stock_model_trains_and_predicts_with_the_loaded_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kernel"
    build = [sys.executable, str(ROOT / "tools" / "build_kernel.py"), "--output", str(folder)]
    subprocess.run(build, check=True, timeout=TIMEOUT)
    again = subprocess.run(build, check=False, timeout=TIMEOUT, capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists and is not empty" in again.stderr
    packages = package_folder(*PACKAGES)
    found = run_program(packages, PROGRAM, str(folder))
    assert found["worst"] < 1e-5
    assert found["modules"] == 3  # the encoder and its two self-attentions
    record(
        "kernels", version(packages, "kernels"),
        "operator loaded from a folder, without this package: five training steps and predictions "
        "of a stock model against stock attention",
        f"{found['worst']:.1e}", "1e-5", 5,
    )  # fmt: skip
