"""Records: their format, their files, and an index of the questions that files answer already."""
