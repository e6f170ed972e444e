"""Config schema: one frozen dataclass per section, with the meaning below each key.

None (``null`` in YAML) means none, off or not set. Paths are strings, because they must survive a
round trip through YAML.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from megatron_deberta.errors import ConfigError

PositionTerms = Literal["c2p+p2c", "c2p", "p2c", "none"]
P2CIndex = Literal["microsoft", "paper"]
AbsolutePositions = Literal["decoder", "input", "none"]
Packing = Literal["full_sentences", "doc_sentences", "segment_pair", "sentence_pair", "best_fit"]
AttentionBackend = Literal["auto", "reference", "chunked", "efficient", "native", "triton"]
NotifyEvent = Literal["ended", "stalled", "rollback", "node_lost", "deadline"]
NOTIFY_EVENTS: tuple[str, ...] = get_args(NotifyEvent)
Head = Literal[
    "mlm",
    "rtd",
    "autoregressive",
    "discriminator",
    "classification",
    "multilabel",
    "regression",
    "spans",
    "tokens",
    "choices",
    "embed",
    "rerank",
]
ObjectiveName = Literal[Head, "mlm+ar", "retromae"]
RankingLoss = Literal["bce", "ranknet", "listnet", "softmax"]
DType = Literal["fp32", "bf16", "fp16"]
EngineName = Literal["deepspeed", "plain"]
PRETRAINING_HEADS: tuple[Head, ...] = ("mlm", "autoregressive", "rtd")
"""Heads that are trained on text without labels."""
LANGUAGE_MODEL_HEADS: tuple[Head, ...] = ("mlm", "autoregressive")
"""Heads that predict tokens; their weights are the same."""
GROUPED_HEADS: tuple[Head, ...] = ("choices", "rerank")
"""Heads whose samples are several rows: the choices, or the passages of a query."""
SINGLE_OUTPUT_HEADS: tuple[Head, ...] = ("regression", "rerank")
"""Heads of one score per row; their weights are the same."""
CLASS_HEADS: tuple[Head, ...] = ("classification", "multilabel", "tokens")
"""Heads with one output per name in ``model.labels``."""
LoraTarget = Literal["query", "key", "value", "output", "up", "down"]
LORA_TARGETS: tuple[str, ...] = get_args(LoraTarget)
BALANCED = ("balanced",)
"""Value of ``finetune.class_weights`` until the training examples are counted."""


def head_of(objective: ObjectiveName) -> Head:
    """Return the head that a model needs for an objective."""
    if objective == "mlm+ar" or objective == "retromae":
        return "mlm"
    return objective


AUTO = 0
"""Value of ``model.vocab_size: auto`` until the tokenizer is known."""


PHASE_KEYS = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "data": "train validation sequence_length packing attend_across_documents",
        "objective": "mask_probability mask_token_probability random_token_probability "
        "max_span_words masking autoregressive_fraction",
        "optimizer": "learning_rate",
        "train": "global_batch_size micro_batch_size ramp_from ramp_increment ramp_steps "
        "ramp_tokens",
    }.items()
    for key in keys.split()
)
"""Keys that a phase may change."""

_Number = TypeVar("_Number", int, float, None)


class Range(NamedTuple):
    """Allowed values of a number; finiteness is checked in addition."""

    text: str
    low: float
    high: float = math.inf


NOT_NEGATIVE = Range("0 or more", 0)
"""Range of every number without another one."""


def positive(default: _Number) -> _Number:
    """Declare a config key above 0."""
    # A smaller number equals 0 once ``flush_denormal_numbers`` was called.
    allowed = Range("a number above 0", sys.float_info.min)
    return field(default=default, metadata={"range": allowed})


def fraction(default: _Number) -> _Number:
    """Declare a config key from 0 to 1."""
    return field(default=default, metadata={"range": Range("a number from 0 to 1", 0, 1)})


def below_one(default: _Number, limit: float = 1) -> _Number:
    """Declare a config key from 0 to below 1, or another limit."""
    allowed = Range(f"a number from 0 to below {limit:g}", 0, math.nextafter(limit, 0))
    return field(default=default, metadata={"range": allowed})


RENAMED_VALUES = {
    "model.conv_init": ("release", "microsoft"),
    "model.p2c_index": ("released", "microsoft"),
    "objective.masking": ("released", "microsoft"),
    "optimizer.schedule": ("release", "microsoft"),
}
"""Old and new value of a key."""


class Section:
    """Base class of the sections of a config."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Replace values that Python code may still give as they were written before.

        0 and ``""`` become None where None is allowed; renamed values cause a warning.
        """
        for key in fields(self):  # type: ignore[arg-type]
            if str(key.type).endswith("| None") and getattr(self, key.name) in (0, ""):
                object.__setattr__(self, key.name, None)
        for name, (old, new) in RENAMED_VALUES.items():
            key_name = name.partition(".")[2]
            if getattr(self, key_name, None) == old:
                message = f"{name}={old} was renamed to {new}; use the new value"
                warnings.warn(message, DeprecationWarning, stacklevel=3)
                object.__setattr__(self, key_name, new)


class KnownSettings(Section):
    """Base class of the dataclass ``ModelConfig``, which users know as ``DebertaConfig``."""

    __slots__ = ()

    def __new__(cls, *values: Any, **settings: Any) -> KnownSettings:
        """Check the names of the settings, before the dataclass's own ``__init__`` would.

        Raises:
            TypeError: there is no setting of a name; names a similar one.
        """
        if values:
            raise TypeError("DebertaConfig takes settings by name, such as hidden_size=768")
        known = [setting.name for setting in fields(cls)]  # type: ignore[arg-type]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
                raise TypeError(f"DebertaConfig has no setting {name}; {hint}")
        return object.__new__(cls)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(KnownSettings):
    """Model architecture. The defaults are those of the released v2/v3 base model."""

    num_layers: int = positive(12)
    """Transformer layers, the last of which the mask decoder shares."""
    hidden_size: int = positive(768)
    """Width of the residual stream."""
    num_heads: int = positive(12)
    """Attention heads; ``hidden_size / num_heads`` is the head size."""
    ffn_hidden_size: int = positive(3072)
    """Inner width of the feed-forward block."""
    vocab_size: int = 128100
    """Rows of the embedding table, without padding for tensor parallelism; ``auto`` (0): as many as
    the tokenizer needs, rounded up to a multiple of 128."""
    max_position_embeddings: int = positive(512)
    """Rows of the absolute-position table."""
    max_relative_positions: int = positive(512)
    """Maximum relative distance (the paper's k, or where log buckets saturate)."""
    position_buckets: int | None = positive(256)
    """Log buckets on each side; null: the paper's clipped linear distances."""
    position_terms: PositionTerms = "c2p+p2c"
    """Position terms of the attention logits (paper, Eq. 2 to 4)."""
    p2c_index: P2CIndex = "microsoft"
    """The p2c term at delta(i,j) as in Microsoft's code (``microsoft``) or delta(j,i), Eq. 4."""
    share_position_projections: bool = True
    """Project positions with the content query/key weights (v2 on) or with separate weights."""
    key_bias: bool = True
    """Bias on the content key projection; the v1 release has none."""
    position_key_bias: bool = True
    """Bias on a separate position key projection; the v1 release has none."""
    normalize_position_table: bool = True
    """LayerNorm on the relative-position table (v2 on)."""
    conv_kernel_size: int | None = positive(None)
    """Kernel size of the convolution beside the first layer; null: none. The 1.5B model has 3."""
    conv_activation: Literal["gelu", "tanh"] = "gelu"
    """Activation of the convolution branch."""
    conv_init: Literal["microsoft", "normal"] = "microsoft"
    """Initial convolution: ``microsoft``, weights and biases uniform within
    1 / sqrt(hidden_size * conv_kernel_size), torch's defaults, which Microsoft's code leaves
    unchanged, or ``normal``, weights like the others and biases 0."""
    mask_decoder_passes: int = 2
    """Passes of the last layer in the enhanced mask decoder; 0: a plain MLM head as in BERT."""
    absolute_positions: AbsolutePositions = "decoder"
    """Where absolute positions are added: ``decoder`` (DeBERTa), ``input`` (RoBERTa), ``none``."""
    hidden_dropout: float = below_one(0.1, 0.998)
    """Dropout of hidden states and of the position table, in multiples of 1/256."""
    attention_dropout: float = below_one(0.1, 0.998)
    """Dropout of attention probabilities."""
    type_vocab_size: int = 0
    """Rows of the token-type embedding; 2 for pairs of segments, 0: none."""
    next_sentence_head: bool = False
    """Add a head on [CLS] that predicts whether the second segment follows the first."""
    head: Head = "mlm"
    """Head of the model; where no file and no override sets it, it follows from
    ``objective.name``: ``mlm``, ``autoregressive`` or ``rtd`` for pretraining, or that of a
    labelled task (docs/finetuning.md), which ``finetune`` sets. ``discriminator``: one of the two
    models of ``rtd``, in exports."""
    generator_layers: int | None = positive(None)
    """``rtd``: layers of the generator, which has the discriminator's width; null: half as many."""
    embedding_sharing: Literal["gdes", "es", "none"] = "gdes"
    """``rtd``: token embeddings of the discriminator: the generator's, without gradient, plus a
    delta (``gdes``), the generator's (``es``), or its own (``none``)."""
    labels: tuple[str, ...] = ()
    """Names of the classes, for the heads ``classification``, ``multilabel`` and ``tokens``."""
    head_dropout: float = below_one(0.1, 0.998)
    """Dropout before the last projection of a task's head."""
    normalize_embeddings: bool = False
    """``embed``: embeddings have length 1, so that their inner product is the cosine."""
    pooler_activation: Literal["auto", "gelu", "tanh"] = "auto"
    """Activation of the pooler of heads on rows; ``auto``: tanh for the architecture of RoBERTa
    (absolute positions at the input, no position terms), else GELU."""
    initializer_range: float = positive(0.02)
    """Standard deviation of initial weights."""
    layer_norm_eps: float = positive(1e-7)
    """Added to the variance in every LayerNorm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig(Section):
    """Tokenizer of the run's shards."""

    path: str | None = None
    """Tokenizer directory, SentencePiece model or ``tokenizer.json``; null: the shards' own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Section):
    """Shards, packing and loading."""

    train: tuple[str, ...] = ()
    """Shard prefixes (paths without ``.bin``/``.idx``), or ``weight prefix weight prefix ...``."""
    validation: tuple[str, ...] = ()
    """Shard prefixes for validation; empty: ``validation_fraction`` of the training documents."""
    validation_fraction: float = below_one(0.05)
    """Fraction of documents held out if ``validation`` is empty; 0: no validation."""
    sequence_length: int = positive(512)
    """Tokens per row, special tokens included."""
    short_sequence_length: int = positive(128)
    """Tokens per row in the first ``short_steps`` steps; the number of rows is the same."""
    short_steps: int = 0
    """Steps at the start that use shorter rows, as BERT does for 90 % of its steps."""
    packing: Packing = "full_sentences"
    """The four formats of RoBERTa, section 4.2: ``full_sentences`` crosses documents,
    ``doc_sentences`` does not; ``segment_pair`` and ``sentence_pair`` have two segments, possibly
    from different documents, and need ``model.next_sentence_head``. ``best_fit`` puts several whole
    documents into a row and cuts only those that are longer than a row."""
    attend_across_documents: bool = True
    """False restricts attention, convolution and absolute positions to each packed document."""
    index_cache: str | None = None
    """Folder of index files for large corpora; null: ``index`` in the run folder."""
    num_workers: int = 2
    """Loader processes per rank; 0 loads in the training process."""
    sample_log: bool = False
    """Write the samples of each step and rank to ``ledger/`` in the run folder."""
    verify_hashes: bool = False
    """Check the SHA-256 of every shard against its manifest at start-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig(Section):
    """Masked language modelling with dynamic span masking, or the loss of a labelled task."""

    name: ObjectiveName = "mlm"
    """The training task, which also decides ``model.head``. ``mlm+ar`` (DeBERTa-MT): masked and
    autoregressive batches; ``retromae``: masked batches, and their rows reconstructed from a
    sentence embedding."""
    class_path: str = ""
    """Class that replaces the objective of this name, such as ``my_package.losses.MyObjective``;
    importable in every rank (``PYTHONPATH``). Empty: the library's."""
    autoregressive_fraction: float = fraction(0.5)
    """``mlm+ar``: fraction of the steps whose batch is autoregressive."""
    mask_probability: float = fraction(0.15)
    """Fraction of a row's tokens that are predicted."""
    mask_token_probability: float = fraction(0.8)
    """Fraction of these that are replaced by [MASK]."""
    random_token_probability: float = fraction(0.1)
    """Fraction of these that are replaced by a random token; the rest are unchanged."""
    max_span_words: int = positive(3)
    """Maximum masked span in words, drawn with p proportional to 1/n; 1 masks single tokens."""
    masking: Literal["microsoft", "uniform"] = "uniform"
    """``microsoft`` is Microsoft's left-to-right generator, which undermasks a row's end."""
    static_masks: int | None = positive(None)
    """Number of fixed masks per row, used in turn (10 in BERT); null: a new mask each epoch."""
    retromae_mask_probability: float = fraction(0.5)
    """``retromae``: fraction of a row's tokens that are masked for its decoder, which predicts
    them from the embedding and the other tokens."""
    retromae_pooling: Literal["mean", "cls"] = "mean"
    """``retromae``: the embedding is the mean of the last layer's states, as ``embed`` reads them,
    or the state of [CLS], as in the paper."""
    sift_weight: float = 0.0
    """Labelled tasks: weight of SiFT's loss (paper, section 4); 0: none. The release uses 5."""
    sift_noise: float = positive(0.01)
    """SiFT: standard deviation of the initial perturbation, which is cut off at twice this."""
    sift_step: float = 1e-4
    """SiFT: largest change of a token's perturbation by the gradient step."""
    sift_inner: Literal["symmetric_kl", "kl"] = "symmetric_kl"
    """SiFT: divergence that the perturbation raises; always the squared error in regression."""
    sift_clean_gradient: bool = True
    """SiFT: the loss changes the prediction without perturbation too, as in the release."""
    positive_similarity: float | None = positive(0.8)
    """``embed``: pairs of this similarity (the score, scaled to 0 to 1; 1 without a score) or more
    are positives, whose negatives are all other second texts of the global batch; null: squared
    error of the cosine to the similarity."""
    temperature: float = positive(0.05)
    """``embed``: cosines are divided by this before the softmax over the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RTDConfig(Section):
    """Replaced-token detection (DeBERTaV3), the objective ``rtd``."""

    update: Literal["joint", "alternating"] = "joint"
    """``joint``: one optimizer step for both models; ``alternating``: the generator's step, then
    the discriminator's with the updated embeddings, each with its own optimizer, gradient norm and
    loss scale, as in the release."""
    discriminator_learning_rate: float | None = positive(None)
    """``alternating``: the discriminator's peak learning rate; null: that of ``optimizer``."""
    discriminator_weight: float = positive(50.0)
    """Weight of the discriminator's loss beside the generator's; the released code uses 10. With
    ``alternating`` it changes little but the clipping."""
    draw_special_tokens: bool = True
    """The generator may draw special tokens such as [SEP], as in the release."""
    excluded_ids: tuple[int, ...] = ()
    """Pieces that the generator does not draw; the run sets the tokenizer's special tokens if
    ``draw_special_tokens`` is false."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Section):
    """Engine, parallelism, recomputation and kernels."""

    engine: Literal[EngineName, "auto"] = "auto"
    """``plain`` is the reference engine, without sharding. ``auto``: ``plain`` for one process on a
    CPU, where it is faster, else ``deepspeed``; a run that began with ``deepspeed`` keeps it."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """Sharded over data-parallel ranks: 1 optimizer, 2 gradients, 3 weights. 0 needs fp32."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory."""
    tensor_parallel_size: int = positive(1)
    """Ranks per layer, within a node. All ranks divided by it are the data-parallel size."""
    sequence_parallel: bool = False
    """Split norms and dropouts along the sequence too (needs tensor_parallel_size > 1)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: none, GELU and dropout masks only, or whole layers."""
    fuse: Literal["auto", True, False] = "auto"
    """Fuse dropout + residual + LayerNorm, bias + GELU and the vocabulary's cross-entropy (on CUDA
    this needs Triton); auto: in pretraining on GPUs of sm_80 or newer with Triton."""
    attention_backend: AttentionBackend = "auto"
    """Implementation of disentangled attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Section):
    """AdamW as in Table 8 of the paper."""

    learning_rate: float = positive(2e-4)
    """Peak learning rate."""
    warmup_steps: int = 10000
    """Steps of linear warm-up from 0."""
    warmup_fraction: float | None = fraction(None)
    """Warm-up as a fraction of ``train.steps``, used instead of ``warmup_steps``."""
    warmup_tokens: int | None = positive(None)
    """Warm-up in tokens, padding included, which determines ``warmup_steps``; null: in steps."""
    schedule: Literal["linear", "cosine", "wsd", "constant", "microsoft"] = "linear"
    """Decay after warm-up: to 0 at ``train.steps``, linearly or as a half cosine; ``wsd``: in the
    last steps only; ``constant``: none; ``microsoft``: 1 - step / ``train.steps``, which
    drops below the peak when the warm-up ends."""
    decay_steps: int | None = positive(None)
    """``wsd``: number of last steps with a decaying rate."""
    decay_fraction: float | None = fraction(None)
    """``wsd``: the same as a fraction of ``train.steps``, used instead."""
    decay_tokens: int | None = positive(None)
    """``wsd``: the same in tokens, which determines ``decay_steps``; null: ``decay_steps``."""
    decay_shape: Literal["1-sqrt", "linear"] = "1-sqrt"
    """``wsd``: decay to 0 as 1 - sqrt(x) or 1 - x, with x from 0 to 1."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and LayerNorm weights are exempt."""
    beta1: float = below_one(0.9)
    """Decay of the first moment."""
    beta2: float = below_one(0.999)
    """Decay of the second moment."""
    eps: float = positive(1e-6)
    """Added to the square root of the second moment."""
    implementation: Literal["torch", "apex"] = "torch"
    """``torch``: torch's fused AdamW. ``apex``: NVIDIA apex's ``FusedAdam``, on GPUs with ZeRO
    stages 0 to 2 without offload; it needs a pass of its own for clipping."""
    bias_correction: bool = True
    """False: no bias correction of the moments, as in the release."""
    layer_decay: float = fraction(1.0)
    """Factor of the learning rate from each layer to the one below it; 1: the same rate. The head
    and the mask decoder have the full rate, the embeddings the lowest one."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not updated, by name or its beginning, as in ``embeddings``."""
    clip_grad_norm: float | None = positive(1.0)
    """Maximum global gradient norm; null: no clipping."""
    ema_decay: float | None = below_one(None)
    """Decay per update of a moving average of the weights, which checkpoints contain and ``convert
    --moving-average`` exports; null: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig(Section):
    """Number formats."""

    dtype: Literal[DType, "auto"] = "auto"
    """Dtype of weights and activations; 16-bit formats have fp32 master weights. ``auto``: bf16
    where all GPUs have it, else fp16 (V100), fp32 on a CPU; a resumed run keeps its own."""
    initial_loss_scale_power: int = 16
    """fp16: initial loss scale, as a power of 2."""
    loss_scale_window: int = positive(1000)
    """fp16: steps without overflow before the loss scale doubles."""
    min_loss_scale: float = positive(1.0)
    """fp16: minimum loss scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityConfig(Section):
    """Skipping of harmful updates, rollbacks and replica checks."""

    non_finite: Literal["skip", "stop"] = "skip"
    """Nonfinite loss or gradient: ``skip`` the update or ``stop`` the run."""
    spike_sigmas: float | None = positive(6.0)
    """Skip updates whose loss or log gradient norm is so many sigmas above the mean; null: off."""
    spike_window: int = positive(128)
    """Number of last updates in that mean."""
    spike_warmup: int = positive(64)
    """Minimum number of updates in the window before spikes are detected."""
    max_skips: int = positive(5)
    """Skips within ``spike_window`` steps that cause a rollback; the data since then is skipped."""
    max_rollbacks: int = 3
    """Maximum consecutive rollbacks without progress; then the run ends. 0: no rollbacks."""
    replica_check_every: int | None = positive(100)
    """Steps between comparisons of replicated weights, also before each save; null: none."""
    rerun: bool = False
    """Run a step with a nonfinite loss or gradient, or before differing replicas, again on the same
    and on another rank: a transient fault is repaired, a persistent one ends the run, and rank,
    host and device are named. Costs two passes over the gradients per micro batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Section):
    """Schedule and retention of checkpoints."""

    save_every: int | None = positive(1000)
    """Steps between checkpoints; null: at the end only."""
    keep_last: int | None = positive(3)
    """Number of newest checkpoints to keep; null: all."""
    keep_every: int | None = positive(None)
    """Keep checkpoints of every multiple of this step permanently; null: none."""
    asynchronous: Literal["auto", True, False] = "auto"
    """Write scheduled checkpoints in the background; training waits for the copy to host memory.
    ``auto``: if the copies fit in half of each node's free memory."""
    local_every: int | None = positive(None)
    """Most steps that a failure loses with saves to the nodes' own disks, each part also to the
    next node (docs/checkpoint-format.md); null: no such saves."""
    local_dir: str | None = None
    """Folder of those saves on every node's own disk or memory, such as ``/dev/shm/megatron``."""
    on_failure: Literal["stop", "continue"] = "stop"
    """If a scheduled checkpoint cannot be written: end the run, or continue without it."""
    resume: Literal["auto", "never", "must"] = "auto"
    """``auto``: from the newest checkpoint, if any; ``never``: the folder must have no checkpoint;
    ``must``: it must have one."""
    load_from: str | None = None
    """Checkpoint with the initial weights of a new run, such as an imported release."""
    extend_positions: Literal["none", "repeat", "interpolate"] = "none"
    """How ``load_from`` fills a larger ``model.max_position_embeddings``: the learned positions
    repeat, or are interpolated; ``none``: refuse."""
    continue_from: str | None = None
    """Checkpoint at whose step a new run continues, with its optimizer state and data position; the
    schedule and the phases after it may differ, as for a decay from a constant rate."""
    verify: bool = True
    """Check every file's SHA-256 before loading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Part of a run with values of its own for some keys.

    Attributes:
        steps: number of optimizer steps.
        tokens: tokens, padding included.
        fraction: fraction of ``train.tokens``, or else of ``train.steps``.
        overrides: ``section.key`` and value, of ``PHASE_KEYS``.
    """

    steps: int | None = None
    tokens: int | None = None
    fraction: float | None = None
    overrides: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(Section):
    """Run folder, length, batch size, seed and validation."""

    run_dir: str = "runs/default"
    """Run folder: checkpoints, logs, metrics, resolved config."""
    steps: int = positive(100000)
    """Number of optimizer steps."""
    tokens: int | None = positive(None)
    """Length of the run in tokens, padding included, which determines ``steps``; null: in steps."""
    phases: tuple[Phase, ...] = ()
    """Phases of the run, in order, each with a duration and values of keys: ``steps``, ``tokens``
    or ``fraction``, and keys such as ``data.sequence_length: 128`` (docs/recipes.md); they
    determine ``steps``."""
    exit_step: int | None = positive(None)
    """Exit with a checkpoint after this step; the schedule is unchanged. null: ``steps``."""
    global_batch_size: int = positive(256)
    """Sequences per optimizer step."""
    ramp_from: int | None = positive(None)
    """Batch ramp: sequences per step at its start; null: no ramp."""
    ramp_increment: int | None = positive(None)
    """Batch ramp: sequences added per level, up to ``global_batch_size``."""
    ramp_steps: int | None = positive(None)
    """Batch ramp: number of steps below ``global_batch_size``, equally many per level."""
    ramp_tokens: int | None = positive(None)
    """The same in tokens, equally many per level; null: ``ramp_steps``."""
    micro_batch_size: int = positive(8)
    """Sequences per rank and forward pass."""
    seed: int = 1234
    """Seed of initial weights, sample order, masks and dropout."""
    eval_every: int | None = positive(1000)
    """Steps between validations; null: at the end only."""
    eval_batches: int = positive(20)
    """Global batches per validation."""
    blimp_every: int | None = positive(None)
    """Steps between evaluations of minimal pairs, also at the end of the run; null: none."""
    blimp_data: str | None = None
    """Folder with BLiMP's JSON Lines, or other minimal pairs in that format."""
    blimp_pairs: int | None = positive(50)
    """First pairs of each paradigm to evaluate; null: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; ``auto``: CUDA if available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig(Section):
    """Fine-tuning on a labelled task; ``megatron-deberta finetune`` sets these keys."""

    task: str | None = None
    """Task file, or the name of a packaged task such as ``sst2``; null: pretraining."""
    data: str | None = None
    """Folder with the task's files."""
    epochs: float | None = positive(None)
    """Passes over the training examples, which determine ``train.steps``; null: ``train.steps``."""
    validations_per_epoch: float | None = positive(None)
    """Validations per pass, which determine ``train.eval_every``; null: ``train.eval_every``."""
    batch_by_length: bool = True
    """Batches of rows of similar length, in random order; False: random rows."""
    pack_rows: bool = False
    """Rows of a micro batch side by side, attention inside each: nearly no padding. Without SiFT;
    dropout has other bits than with padding."""
    patience: int | None = positive(None)
    """Validations without a better score after which the run ends; null: never."""
    keep_best: bool = True
    """Save a checkpoint at each better score, and keep the best one."""
    cache: str | None = None
    """Folder of encoded examples; null: ``encoded`` in the run folder."""
    ranking_loss: RankingLoss = "bce"
    """Loss of the head ``rerank``: ``bce`` of each passage (relevance from 0 to 1), ``ranknet`` of
    each pair of different relevance, ``listnet`` (softmax of the relevance) or ``softmax``
    (relevance divided by its sum) of each query's list."""
    class_weights: tuple[str, ...] = ()
    """Weight of each class in the loss, in the order of the task's labels, of several labels per
    example the weight of examples that have it; ``balanced``: inversely proportional to its number
    of training examples (words); the numbers are in the run's config. Empty: all 1."""
    focal_gamma: float = 0.0
    """Exponent of the focal loss, which lowers the loss of what is predicted well; 0: none."""
    lora_rank: int | None = positive(None)
    """Train the head and low-rank adapters of this rank, and no other weight; null: all weights."""
    lora_alpha: float = positive(16.0)
    """The adapters' products are multiplied by this number divided by the rank."""
    lora_targets: tuple[str, ...] = ("query", "key", "value")
    """Projections of each layer that have an adapter: ``query``, ``key``, ``value``, ``output`` of
    the attention, ``up``, ``down`` of the feed-forward block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(Section):
    """Console output and metrics."""

    every: int = positive(10)
    """Steps between console lines and metric records."""
    tensorboard: bool = True
    """Write TensorBoard events to ``tensorboard/`` in the run folder."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the metrics, too (package wandb); null: none."""
    samples: int = 2
    """Validation rows whose masks and predictions go to ``samples.jsonl``; 0: none."""
    level: Literal["debug", "info", "warning"] = "info"
    """Minimum level of messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig(Section):
    """Intended size of the job, time-outs and supervision. All keys are optional."""

    nodes: int | None = positive(None)
    """Nodes the run is sized for; null: not specified. Other numbers work if the batch divides."""
    ranks_per_node: int | None = positive(None)
    """Ranks (GPUs) per node; tensor parallelism stays within a node. null: not specified."""
    collective_timeout_minutes: float = positive(30.0)
    """Time-out of collectives."""
    startup_timeout_seconds: float = positive(1800.0)
    """Time-out from the start to the first step, and of each of the first two steps."""
    data_timeout_seconds: float = positive(600.0)
    """Time-out of loading a step's micro batches."""
    step_timeout_seconds: float = positive(120.0)
    """Minimum time-out of a micro batch or an update."""
    step_timeout_factor: float = positive(20.0)
    """The same time-out as a multiple of the median step time; the larger one applies."""
    evaluation_timeout_seconds: float = positive(3600.0)
    """Time-out of a validation."""
    save_timeout_seconds: float = positive(3600.0)
    """Time-out of a checkpoint, of logging, and of the shutdown."""
    straggler_factor: float = positive(1.3)
    """Report a rank as a straggler when its own step time exceeds this multiple of the median."""
    straggler_window_steps: int = positive(50)
    """Steps per comparison of ranks; a straggler is reported after two consecutive windows."""
    bad_node_hours: float = positive(24.0)
    """How long a run excludes a node that blocked it."""
    notify: tuple[str, ...] = ()
    """Webhooks (URLs), to which an event is posted as JSON, and names of programs in
    ``~/.config/megatron_deberta/notify``, which get it on standard input."""
    notify_events: tuple[str, ...] = NOTIFY_EVENTS
    """Events to tell about: the run ends, makes no progress, rolls back, loses a node, or its ETA
    passes ``cluster.deadline``."""
    deadline: str | None = None
    """Local date and time at which the run should be finished, as in 2026-12-31T18:00."""
    prometheus_file: str | None = None
    """Write metrics of the run for node_exporter's textfile collector to this file (.prom)."""
    prometheus_port: int | None = positive(None)
    """Serve metrics of the run to Prometheus on this port of localhost of the first node; null: do
    not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Config of a run; load it with ``megatron_deberta.config.load_config``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    rtd: RTDConfig = field(default_factory=RTDConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


SECTIONS: dict[str, type[Section]] = get_type_hints(RunConfig)
"""Class of each section of a run's config."""


def refuse(config: RunConfig, problems: Iterable[str]) -> None:
    """Raise a ``ConfigError`` for the first problem, if there is one.

    Args:
        config: the run.
        problems: messages, in which ``$section.key`` stands for ``section.key=value``.

    Raises:
        ConfigError: there is one.
    """
    problem = next(iter(problems), None)
    if problem is not None:
        raise ConfigError(re.sub(r"\$(\w+)\.(\w+)", functools.partial(_setting, config), problem))


def _setting(config: RunConfig, name: re.Match[str]) -> str:
    """Return a key and its value as on the command line; other text is left as it is."""
    section = getattr(config, name[1], None)
    if not hasattr(section, name[2]):
        # Text of a user, such as a label.
        return name[0]
    value = getattr(section, name[2])
    if isinstance(value, float):
        value = f"{value:g}"
    elif isinstance(value, tuple):
        value = f"[{','.join(map(str, value))}]"
    elif isinstance(value, bool):
        value = str(value).lower()
    elif value is None:
        value = "null"
    return f"{name[1]}.{name[2]}={value}"


def check_ranges(config: RunConfig) -> None:
    """Check that every number of a run's config is in its range.

    Raises:
        ConfigError: names the key, its value and the range.
    """
    for section in fields(config):
        values = getattr(config, section.name)
        for key in fields(values):
            value, allowed = getattr(values, key.name), key.metadata.get("range", NOT_NEGATIVE)
            # Comparisons are exact, also where an integer has no floating-point number.
            largest = (1 << 63) - 1 if isinstance(value, int) else 1e300
            if isinstance(value, int | float) and not (
                -largest <= value <= largest and allowed.low <= value <= allowed.high
            ):
                or_null = " or null" if str(key.type).endswith("| None") else ""
                raise ConfigError(
                    f"{section.name}.{key.name}={value} is out of range; write {allowed.text}"
                    f"{or_null}"
                )


def with_task_head(
    model: ModelConfig, head: Head, labels: tuple[str, ...] = (), head_dropout: float = 0.1
) -> ModelConfig:
    """Return the encoder's architecture with another head, and without the mask decoder.

    Args:
        model: architecture of a pretrained or fine-tuned model.
        head: head of a labelled task.
        labels: names of the classes.
        head_dropout: dropout before the last projection.
    """
    at_input = model.absolute_positions == "input"
    return replace(
        model,
        head=head,
        labels=labels,
        head_dropout=head_dropout,
        next_sentence_head=False,
        mask_decoder_passes=0,
        absolute_positions="input" if at_input else "none",
        generator_layers=None,
        embedding_sharing="gdes",
    )
