"""Which samples run where and when."""
