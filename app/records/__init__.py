"""Records: their format, files of them, and what such files answer already."""
