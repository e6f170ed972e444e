"""Fine-tuning on labelled tasks: settings, data, searches, and curves over checkpoints."""
