"""Every shipped config parses, holds on the world it is sized for, and is the size it claims."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.config import load_config, validate_for_world
from megatron_deberta.config.yaml_reader import parse_yaml
from megatron_deberta.model.replaced_tokens import generator_config
from megatron_deberta.model.task_models import parameter_shapes

CONFIGS = Path(__file__).parents[3] / "configs"
MODELS = sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))
RUNS = sorted(path.stem for path in (CONFIGS / "runs").glob("*.yaml"))

# Without head and absolute positions, as Microsoft counts; in millions.
RELEASED_SIZES = {
    "v1_base": 139,
    "v1_large": 405,
    "v1_xlarge": 758,
    "v2_xlarge": 885,
    "v2_xxlarge": 1564,
    "script_base": 184,
    "base": 139,
    "large": 405,
    "900m": 885,
    "1.5b": 1564,
    "ablation_base": 139,
}
# Runs of the paper's Tables 4 and 13, as the changes of the ablation model.
SHARED = ["model.share_position_projections=true", "model.key_bias=true"]
CONVOLUTION = [*SHARED, "model.conv_kernel_size=3"]
# Rows of the paper's Table 4 that leave something out, as overrides of the ablation model.
NO_DECODER = ["model.mask_decoder_passes=0", "model.absolute_positions=none"]
NO_C2P, NO_P2C = ["model.position_terms=p2c"], ["model.position_terms=c2p"]
ABLATIONS = {
    "-EMD": NO_DECODER,
    "-C2P": NO_C2P,
    "-P2C": NO_P2C,
    "-(EMD+C2P)": NO_DECODER + NO_C2P,
    "-(EMD+P2C)": NO_DECODER + NO_P2C,
}
NAMED_ABLATIONS = {
    "no_emd": NO_DECODER,
    "no_c2p": NO_C2P,
    "no_p2c": NO_P2C,
    "no_emd_c2p": NO_DECODER + NO_C2P,
    "no_emd_p2c": NO_DECODER + NO_P2C,
    "shared": SHARED,
    "shared_conv": CONVOLUTION,
    "shared_conv_128k": [*CONVOLUTION, "model.vocab_size=128100"],
}


def test_v3_configs_name_the_objective_that_trains_them() -> None:
    """The release was trained by replaced token detection."""
    released = [name for name in MODELS if name.startswith("v3_")]
    for name in [name for name in released if not name.endswith("_rtd")]:
        path = CONFIGS / "models" / f"{name}.yaml"
        plain = load_config(path)
        stated = parse_yaml(path.read_text(encoding="utf-8"), name)
        assert stated["objective"]["name"] == plain.objective.name
        assert f"{name}_rtd" in released
        config = load_config(CONFIGS / "models" / f"{name}_rtd.yaml")
        assert config.model == replace(plain.model, head="rtd")
        objective = config.objective
        assert (objective.name, objective.max_span_words) == ("rtd", 1)
        assert objective.mask_token_probability == 1.0
        generator = generator_config(config.model)
        assert 2 * generator.num_layers == config.model.num_layers
        assert generator.hidden_size == config.model.hidden_size


@pytest.mark.parametrize("name", RUNS)
def test_runs_fit_the_world_they_are_sized_for(name: str) -> None:
    config = load_config(CONFIGS / "runs" / f"{name}.yaml")
    world_size = (config.cluster.nodes or 0) * (config.cluster.ranks_per_node or 0)
    assert (world_size > 0) == name.endswith(("_dgx2", "_h100"))
    validate_for_world(config, world_size or config.parallel.tensor_parallel_size)
    assert config.train.run_dir == f"runs/{name}"


def test_rows_of_table_10_differ_in_model_and_objective_only() -> None:
    models = {
        "roberta": "roberta_base",
        "deberta": "base",
        "deberta_ap": "deberta_ap_base",
        "deberta_mt": "base",
    }
    expected = load_config(CONFIGS / "runs" / "base_h100.yaml")
    for name, model in models.items():
        config = load_config(CONFIGS / "runs" / f"table10_{name}_h100.yaml")
        assert config.model == load_config(CONFIGS / "models" / f"{model}.yaml").model
        assert config.train.steps == 200_000
        assert config.objective.name == ("mlm+ar" if name == "deberta_mt" else "mlm")
        same = replace(config, model=expected.model, objective=expected.objective)
        assert replace(same, train=expected.train) == expected


@pytest.mark.parametrize(("name", "millions"), RELEASED_SIZES.items())
def test_parameter_counts(name: str, millions: int) -> None:
    config = load_config(CONFIGS / "models" / f"{name}.yaml")
    counted = sum(
        math.prod(shape)
        for parameter, shape in parameter_shapes(config.model).items()
        if not parameter.startswith(("head.", "mask_decoder."))
    )
    assert abs(counted / 1e6 - millions) < 1


def test_roberta_has_no_relative_positions() -> None:
    config = load_config(CONFIGS / "models" / "roberta_base.yaml")
    names = parameter_shapes(config.model)
    assert "embeddings.position.weight" in names
    assert not [name for name in names if "relative" in name or "mask_decoder" in name]


@pytest.mark.parametrize("name", NAMED_ABLATIONS)
@pytest.mark.parametrize("hardware", ["dgx2", "h100"])
def test_named_ablations_differ_in_their_overrides_only(hardware: str, name: str) -> None:
    path = CONFIGS / "runs" / f"ablation_{name}_{hardware}.yaml"
    overrides = [*NAMED_ABLATIONS[name], f"train.run_dir=runs/{path.stem}"]
    base = load_config(CONFIGS / "runs" / f"ablation_{hardware}.yaml")
    assert load_config(path) == load_config(path.with_name(f"ablation_{hardware}.yaml"), overrides)
    assert load_config(path).model != base.model


def test_documented_ablations_are_these() -> None:
    page = (CONFIGS.parent / "docs" / "config.md").read_text(encoding="utf-8")
    for row, overrides in ABLATIONS.items():
        assert f"| {row} | `{' '.join(overrides)}` |" in page


@pytest.mark.parametrize("name", [name for name in RUNS if "dgx2" in name])
def test_table_8(name: str) -> None:
    config = load_config(CONFIGS / "runs" / f"{name}.yaml")
    optimizer, train = config.optimizer, config.train
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-6)
    assert (optimizer.weight_decay, optimizer.clip_grad_norm) == (0.01, 1.0)
    assert (optimizer.schedule, optimizer.warmup_steps) == ("linear", 10_000)
    assert train.steps == 1_000_000
    batch, rate = {
        "base": (2048, 2e-4),
        "large": (2016, 2e-4),  # 2,048 does not divide over 96 ranks
        "1.5b": (2048, 1.5e-4),
        "ablation": (256, 1e-4),
    }[name.split("_")[0]]
    assert (train.global_batch_size, optimizer.learning_rate) == (batch, rate)
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.1, 0.1)
