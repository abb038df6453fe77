"""What others read of records: text files, tables, metadata, Parquet. The records stay as they are."""
