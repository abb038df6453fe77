"""Simulates aclruntime on a machine where the loader cannot find CANN's libraries."""

raise ImportError("libascendcl.so: cannot open shared object file: No such file or directory")
