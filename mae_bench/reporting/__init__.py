"""Records, the store, tables and published numbers. Imports no torch."""
