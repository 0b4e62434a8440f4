"""How a dump lies in a Parquet file, and how it gets into and out of one."""
