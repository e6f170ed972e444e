"""Training stability: the numeric guard, rollback to a checkpoint, checks of replicated weights."""
