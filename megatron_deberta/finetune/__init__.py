"""Fine-tuning on labelled tasks: runs, prediction and evaluation."""
