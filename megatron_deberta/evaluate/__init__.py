"""Evaluation of models: validation, likelihoods, predictions, selection and comparison."""
