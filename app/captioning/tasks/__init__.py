"""Tasks: how a question is encoded, answered and recorded."""
