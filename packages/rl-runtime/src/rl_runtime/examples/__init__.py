"""Examples of hooks that recipes name by import path."""
