"""Built-in filters, selected by import path."""
