"""What must hold between keys, and the arithmetic of batches."""

import pytest

from megatron_deberta.config import batch_arithmetic, load_config, validate_for_world
from megatron_deberta.errors import ConfigError, TopologyError

TAGGER = (
    "model.head=tokens objective.name=tokens model.labels=[a,b] finetune.task=tags "
    "model.mask_decoder_passes=0 model.absolute_positions=none"
)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("model.num_heads=7", ["model.num_heads=7", "model.hidden_size=768", "use 6"]),
        ("parallel.tensor_parallel_size=5", ["model.num_heads=12", "1, 2, 3, 4, 6"]),
        (
            "parallel.tensor_parallel_size=4 model.ffn_hidden_size=3074",
            ["model.ffn_hidden_size=3074", "1, 2"],
        ),
        ("parallel.sequence_parallel=true", ["sequence_parallel", "tensor_parallel_size"]),
        (
            "parallel.sequence_parallel=true parallel.tensor_parallel_size=4 "
            "data.sequence_length=510",
            ["data.sequence_length=510", "choose one of [1, 2, 3, 5"],
        ),
        ("parallel.zero_stage=0 precision.dtype=bf16", ["zero_stage=0", "bf16"]),
        ("parallel.zero_stage=0 parallel.offload_optimizer=true", ["offload_optimizer"]),
        ("parallel.engine=plain parallel.offload_optimizer=true", ["offload_optimizer"]),
        ("data.sequence_length=513", ["data.sequence_length=513", "max_position_embeddings=512"]),
        ("data.sequence_length=3", ["data.sequence_length=3"]),
        ("data.packing=segment_pair", ["next_sentence_head=false", "segment_pair", "to true"]),
        ("model.next_sentence_head=true", ["next_sentence_head=true", "full_sentences"]),
        (
            "data.packing=sentence_pair model.next_sentence_head=true",
            ["model.type_vocab_size=0", "use 2"],
        ),
        (
            "data.packing=sentence_pair model.next_sentence_head=true model.type_vocab_size=2 "
            "data.attend_across_documents=false",
            ["attend_across_documents=false", "sentence_pair", "to true"],
        ),
        (
            "data.short_steps=5 data.short_sequence_length=512",
            ["data.short_sequence_length=512", "data.short_steps=5"],
        ),
        ("model.mask_decoder_passes=0", ["absolute_positions=decoder", "mask_decoder_passes=0"]),
        ("model.position_buckets=1024", ["position_buckets=1024", "max_relative_positions=512"]),
        ("model.conv_kernel_size=4", ["conv_kernel_size=4", "use 5"]),
        ("objective.mask_probability=0", ["mask_probability=0"]),
        ("objective.mask_probability=1.5", ["mask_probability=1.5", "0 to 1"]),
        ("objective.random_token_probability=0.3", ["0.8", "0.3", "1.1"]),
        ("model.hidden_dropout=1", ["hidden_dropout=1.0", "below 0.998"]),
        ("model.position_buckets=255", ["position_buckets=255", "use 256"]),
        ("optimizer.beta1=1", ["beta1=1.0", "below 1"]),
        ("model.attention_dropout=.nan", ["attention_dropout=nan"]),
        ("optimizer.learning_rate=.inf", ["learning_rate=inf"]),
        ("optimizer.learning_rate=5", ["learning_rate=5", "2e-4"]),
        ("train.steps=100", ["warmup_steps=10000", "train.steps=100", "warmup_fraction=0.1"]),
        ("train.exit_step=100001", ["exit_step=100001", "train.steps=100000"]),
        ("train.run_dir=", ["train.run_dir"]),
        ("train.seed=-1", ["train.seed=-1"]),
        ("precision.initial_loss_scale_power=40", ["initial_loss_scale_power=40"]),
        ("stability.spike_sigmas=2", ["stability.spike_sigmas=2", "use 6"]),
        ("stability.spike_warmup=200", ["stability.spike_warmup=200", "spike_window=128"]),
        ("finetune.focal_gamma=1", ["finetune.focal_gamma=1", "model.head=mlm", "multilabel"]),
        (f"{TAGGER} finetune.class_weights=[1]", ["class_weights=[1]", "2 classes a, b"]),
        (f"{TAGGER} finetune.class_weights=[1,-2]", ["class_weights=[1,-2]", "or balanced"]),
        (f"{TAGGER} finetune.class_weights=even", ["class_weights=[even]", "or balanced"]),
        ("finetune.lora_rank=8", ["finetune.lora_rank=8", "labelled tasks", "null"]),
        ("finetune.lora_rank=-1", ["finetune.lora_rank=-1", "above 0 or null"]),
        (f"{TAGGER} finetune.lora_rank=769", ["lora_rank=769", "hidden_size=768", "such as 8"]),
        (
            f"{TAGGER} finetune.lora_rank=8 finetune.lora_targets=[query,dense]",
            ["finetune.lora_targets=[query,dense]", "query, key, value, output, up, down"],
        ),
        (
            f"{TAGGER} finetune.lora_rank=8 finetune.lora_targets=[]",
            ["finetune.lora_targets=[]", "one or more"],
        ),
        (
            f"{TAGGER} finetune.lora_rank=8 optimizer.freeze=[embeddings]",
            ["finetune.lora_rank=8", "remove optimizer.freeze"],
        ),
        (
            f"{TAGGER} finetune.lora_rank=8 finetune.lora_targets=[up,up]",
            ["finetune.lora_targets=[up,up]", "once"],
        ),
        ("stability.max_skips=500", ["stability.max_skips=500", "use 128 or less"]),
        ("checkpoint.keep_every=2500", ["keep_every=2500", "save_every=1000", "use 3000"]),
        (
            "cluster.ranks_per_node=8 parallel.tensor_parallel_size=3",
            ["tensor_parallel_size=3", "ranks_per_node=8", "1, 2, 4, 8"],
        ),
    ],
)
def test_broken_rules_name_key_value_and_remedy(overrides: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides.split())
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_convolution_must_divide_only_where_there_is_one() -> None:
    odd = ["model.hidden_size=36", "model.num_heads=6", "model.ffn_hidden_size=144"]
    load_config(None, [*odd, "parallel.tensor_parallel_size=6", "model.conv_kernel_size=3"])
    odd = ["model.hidden_size=60", "model.num_heads=12", "parallel.tensor_parallel_size=12"]
    load_config(None, [*odd, "model.conv_kernel_size=3"])


def test_without_absolute_positions_rows_may_be_longer_than_the_table() -> None:
    load_config(None, ["model.absolute_positions=none", "data.sequence_length=4096"])


@pytest.mark.parametrize(
    ("total", "micro", "dp_size", "accumulation"),
    [(256, 8, 1, 32), (256, 8, 32, 1), (2048, 8, 64, 4), (30, 5, 3, 2)],
)
def test_batch_arithmetic(total: int, micro: int, dp_size: int, accumulation: int) -> None:
    config = load_config(
        None, [f"train.global_batch_size={total}", f"train.micro_batch_size={micro}"]
    )
    batch = batch_arithmetic(config, dp_size)
    assert batch.accumulation_steps == accumulation
    assert batch.micro_batch_size * batch.accumulation_steps * batch.dp_size == total
    assert batch.tokens_per_step == total * 512


@pytest.mark.parametrize(
    ("total", "dp_size", "remedies"),
    [
        (100, 4, ["96, 128", "train.micro_batch_size=5"]),
        (2048, 96, ["1536, 2304"]),
        (8, 4, ["nearest train.global_batch_size: 32;", "train.micro_batch_size=2"]),
        (7, 4, ["nearest train.global_batch_size: 32"]),
    ],
)
def test_batches_that_do_not_divide_name_the_nearest_that_do(
    total: int, dp_size: int, remedies: list[str]
) -> None:
    config = load_config(None, [f"train.global_batch_size={total}"])
    with pytest.raises(ConfigError) as caught:
        batch_arithmetic(config, dp_size)
    for remedy in (f"train.global_batch_size={total}", *remedies):
        assert remedy in str(caught.value)


def test_remedies_are_accepted() -> None:
    for total, micro in ((96, 8), (128, 8), (100, 5)):
        overrides = [f"train.global_batch_size={total}", f"train.micro_batch_size={micro}"]
        batch_arithmetic(load_config(None, overrides), 4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_must_divide_into_tensor_parallel_groups(world_size: int) -> None:
    config = load_config(None, ["parallel.tensor_parallel_size=2"])
    with pytest.raises(TopologyError, match=f"=2 does not divide world_size={world_size}"):
        validate_for_world(config, world_size)


def test_world_gives_data_parallel_size() -> None:
    config = load_config(None, ["parallel.tensor_parallel_size=2"])
    assert validate_for_world(config, 8).dp_size == 4
