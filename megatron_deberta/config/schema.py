"""Every knob of a run, one frozen dataclass a section, its meaning under each field.

Owns names, types and defaults. Refuses cross-section logic (``rules.py``) and file reading
(``loader.py``). Paths are strings, because they must survive a round trip through YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PositionTerms = Literal["c2p+p2c", "c2p", "p2c", "none"]
P2CIndex = Literal["released", "paper"]
AbsolutePositions = Literal["decoder", "input", "none"]
Packing = Literal["full_sentences", "doc_sentences", "segment_pair", "sentence_pair"]
AttentionBackend = Literal["auto", "reference", "chunked", "triton"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture. Defaults are those of the released v2/v3 base model."""

    num_layers: int = 12
    """Transformer layers, the last of which the mask decoder shares."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Attention heads; ``hidden_size / num_heads`` is the head size."""
    ffn_hidden_size: int = 3072
    """Inner width of the feed-forward block."""
    vocab_size: int = 128100
    """Rows of the embedding table, without padding for tensor parallelism."""
    max_position_embeddings: int = 512
    """Rows of the absolute-position table."""
    max_relative_positions: int = 512
    """Largest distance told apart (the paper's k, or where log buckets saturate)."""
    position_buckets: int = 256
    """Log buckets on each side; 0 means the paper's clipped linear distances."""
    position_terms: PositionTerms = "c2p+p2c"
    """Which position terms enter the attention logits (paper, Eq. 2 to 4)."""
    p2c_index: P2CIndex = "released"
    """The p2c term at delta(i,j) as in Microsoft's code (``released``) or delta(j,i), Eq. 4."""
    share_position_projections: bool = True
    """Project positions with the content query/key weights (v2 on) or with weights of their own."""
    key_bias: bool = True
    """Bias on the content key projection; the v1 release has none."""
    position_key_bias: bool = True
    """Bias on a separate position key projection; the v1 release has none."""
    normalize_position_table: bool = True
    """LayerNorm on the relative-position table (v2 on)."""
    conv_kernel_size: int = 0
    """Width of the convolution beside the first layer; 0 leaves it out. The 1.5B model has 3."""
    conv_activation: Literal["gelu", "tanh"] = "gelu"
    """Activation of the convolution branch."""
    mask_decoder_passes: int = 2
    """Passes of the last layer in the enhanced mask decoder; 0 is a plain MLM head (BERT's)."""
    absolute_positions: AbsolutePositions = "decoder"
    """Where they enter: ``decoder`` (DeBERTa), ``input`` (RoBERTa, DeBERTa-AP), ``none``."""
    hidden_dropout: float = 0.1
    """Dropout of hidden states and of the position table."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities."""
    type_vocab_size: int = 0
    """Rows of the token-type table at the input; 2 tells the halves of a pair apart, 0: none."""
    next_sentence_head: bool = False
    """A head on [CLS] that says whether the second half of a pair goes on from the first."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    layer_norm_eps: float = 1e-7
    """Added to the variance in every LayerNorm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Which tokenizer the run's text went through."""

    path: str = ""
    """Tokenizer directory, SentencePiece model or ``tokenizer.json``; empty: the shards' own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Shards, packing, order and loading."""

    train: tuple[str, ...] = ()
    """Shard prefixes (paths without ``.bin``/``.idx``), or ``weight prefix weight prefix ...``."""
    validation: tuple[str, ...] = ()
    """Shard prefixes for validation; empty: ``validation_fraction`` of the training documents."""
    validation_fraction: float = 0.05
    """Share of documents held out where ``validation`` is empty; 0 trains on everything."""
    sequence_length: int = 512
    """Tokens a row, special tokens included."""
    short_sequence_length: int = 128
    """Tokens a row in the first ``short_steps`` steps; batches have as many rows as later."""
    short_steps: int = 0
    """Steps at the start of a run that train on shorter rows, as BERT's first nine tenths."""
    packing: Packing = "full_sentences"
    """The four formats of RoBERTa, section 4.2: ``full_sentences`` crosses documents,
    ``doc_sentences`` does not; ``segment_pair`` and ``sentence_pair`` are two halves of which one
    may be from elsewhere, and need ``model.next_sentence_head``."""
    attend_across_documents: bool = True
    """False keeps attention, convolution and absolute positions inside each packed document."""
    index_cache: str = ""
    """Folder of indices over millions of documents; empty: ``index`` in the run folder."""
    num_workers: int = 2
    """Loader processes a rank; 0 loads in the training process."""
    sample_log: bool = False
    """Write which sample went to which step, rank and row to ``ledger/`` in the run folder."""
    verify_hashes: bool = False
    """Check the SHA-256 of every shard against its manifest at start-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """Masked language modelling with dynamic span masking."""

    name: Literal["mlm"] = "mlm"
    """The training task."""
    mask_probability: float = 0.15
    """Share of a row's tokens that are predicted."""
    mask_token_probability: float = 0.8
    """Share of those replaced by [MASK]."""
    random_token_probability: float = 0.1
    """Share of those replaced by a random token; the rest stay as they are."""
    max_span_words: int = 3
    """Longest masked span in words, drawn with p proportional to 1/n; 1 masks single pieces."""
    masking: Literal["released", "uniform"] = "uniform"
    """``released`` is Microsoft's left-to-right generator, which starves a row's end."""
    static_masks: int = 0
    """Masks drawn in advance for each row, used in turn (BERT has 10); 0: a new one each epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the model and the batch are spread over ranks."""

    tensor_parallel_size: int = 1
    """Ranks a layer is split over; within a node. Data-parallel size is what remains."""
    sequence_parallel: bool = False
    """Split norms and dropouts along the sequence too (needs tensor_parallel_size > 1)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recomputed in backward: none, cheap parts (GELU, dropout masks), or whole layers."""
    fuse: bool = False
    """Compile dropout + residual + LayerNorm, and bias + GELU (on CUDA this needs Triton)."""
    attention_backend: AttentionBackend = "auto"
    """Which implementation of disentangled attention runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW as in Table 8 of the paper."""

    learning_rate: float = 2e-4
    """Peak learning rate."""
    warmup_steps: int = 10000
    """Steps of linear warm-up from 0."""
    schedule: Literal["linear", "constant"] = "linear"
    """Decay after warm-up: to 0 at ``train.steps``, or none."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and LayerNorm weights are exempt."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Added to the root of the second moment."""
    bias_correction: bool = True
    """False is the release's Adam, which does not correct the moments' bias."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm; 0 does not clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Number formats, the engine and its ZeRO stage."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Format of weights and activations; 16-bit formats keep fp32 master weights."""
    engine: Literal["deepspeed", "plain"] = "deepspeed"
    """``plain`` is the readable oracle that tests compare DeepSpeed with."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """Sharded over data-parallel ranks: 1 optimizer, 2 gradients, 3 weights. 0 needs fp32."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory."""
    initial_loss_scale_power: int = 16
    """fp16: the loss scale starts at 2 to this power."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the scale doubles."""
    min_loss_scale: float = 1.0
    """fp16: the scale never falls below this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What happens to updates that would do harm, and how replicas are compared."""

    non_finite: Literal["skip", "stop"] = "skip"
    """A loss or gradient that is not finite: ``skip`` the update, or ``stop`` the run."""
    spike_sigmas: float = 6.0
    """Skip updates whose loss, or whose gradient norm's logarithm, is this many standard deviations
    above the mean of the last updates; 0 skips none."""
    spike_window: int = 128
    """How many last updates that mean is taken over."""
    spike_warmup: int = 64
    """Updates the window must hold before any is compared with it."""
    max_skips: int = 5
    """Skips within ``spike_window`` steps after which the run goes back to its last good
    checkpoint and leaves out the data since then."""
    max_rollbacks: int = 3
    """Times it goes back without getting beyond the trouble before it ends; 0: it never does."""
    replica_check_every: int = 100
    """Steps between comparisons of weights that ranks share, one before each save too; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and what to keep."""

    save_every: int = 1000
    """Steps between checkpoints; 0 saves at the end only."""
    keep_last: int = 3
    """Newest checkpoints kept; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    asynchronous: bool = False
    """Write scheduled checkpoints while training goes on; it waits for the copy in host memory."""
    on_failure: Literal["stop", "continue"] = "stop"
    """A scheduled checkpoint that cannot be written: end the run, or train on until the next."""
    resume: Literal["auto", "never", "must"] = "auto"
    """``auto`` continues from the newest committed checkpoint, ``never`` refuses a used folder."""
    load_from: str = ""
    """Checkpoint whose weights a new run starts from (e.g. an imported release)."""
    verify: bool = True
    """Check every file's SHA-256 before loading."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, batch, seed and validation of a run."""

    run_dir: str = "runs/default"
    """Folder of the run: checkpoints, logs, metrics, resolved config."""
    steps: int = 100000
    """Optimizer steps in all."""
    exit_step: int = 0
    """Stop with a checkpoint after this step without changing the schedule; 0: at ``steps``."""
    global_batch_size: int = 256
    """Sequences an optimizer step."""
    micro_batch_size: int = 8
    """Sequences a rank and forward pass."""
    seed: int = 1234
    """Seed of weights, sample order, masks and dropout."""
    eval_every: int = 1000
    """Steps between validations; 0: at the end only."""
    eval_steps: int = 20
    """Global batches a validation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; ``auto`` takes CUDA where there is some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is shown and written while training."""

    every: int = 10
    """Steps between lines and metric records."""
    tensorboard: bool = True
    """Write TensorBoard events to ``tensorboard/`` in the run folder."""
    level: Literal["debug", "info", "warning"] = "info"
    """Least severe message shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """What the launcher promises the job."""

    nodes: int = 0
    """Nodes the run is sized for; 0: not said. Other numbers run it where the batch divides."""
    ranks_per_node: int = 0
    """Ranks (GPUs) a node the run is sized for; tensor parallelism stays within; 0: not said."""
    collective_timeout_minutes: float = 30.0
    """How long a collective may wait before the process group gives up."""
    startup_timeout_seconds: float = 1800.0
    """Supervision: from the start to the first step, and for each of the first two steps."""
    data_timeout_seconds: float = 600.0
    """Supervision: how long a rank may wait for a step's micro batches."""
    step_timeout_seconds: float = 120.0
    """Supervision: how long a micro batch or an update may take, if the factor allows no more."""
    step_timeout_factor: float = 20.0
    """Supervision: the same, in median steps."""
    evaluation_timeout_seconds: float = 3600.0
    """Supervision: how long a validation may take."""
    save_timeout_seconds: float = 3600.0
    """Supervision: how long a checkpoint, the log, or the end may take."""
    straggler_factor: float = 1.3
    """A rank is told to be slow if its own part of a step takes so many times the median's."""
    straggler_window_steps: int = 50
    """Steps over which ranks are compared; slow is who is slow in two windows in a row."""
    bad_node_hours: float = 24.0
    """How long a run stays away from a node that held it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A whole run; read it with ``megatron_deberta.config.load_config``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
