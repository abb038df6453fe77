"""Exports of records: text files, tables, metadata, Parquet. The records are not changed."""
