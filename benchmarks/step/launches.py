"""Kernels of operators that launch more than one."""

# Of attention: the products of two tables' blocks, the tables' scaling, delta, key, key gradient,
# query gradient, table gradient, two folds
LAUNCHES = {
    "compiled::drop_add_norm_backward": 2,
    "compiled::_bias_gelu_backward": 2,
    "megatron_deberta::disentangled_attention": 5,
    "megatron_deberta::disentangled_attention_backward": 11,
}
