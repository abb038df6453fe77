"""Pages of docs/ as Jinja templates, and their renderer."""
