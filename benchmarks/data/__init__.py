"""The data loader, its indices and masking."""
