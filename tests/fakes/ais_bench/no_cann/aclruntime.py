"""Simulates aclruntime on a machine where CANN's libraries are not on the path."""

raise ImportError("libascendcl.so: cannot open shared object file: No such file or directory")
