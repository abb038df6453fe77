"""Files and requests as people have them, after public reports, each with its right result."""
