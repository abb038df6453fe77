"""Training: labelled data -> an adapter over a frozen LLaMA."""
