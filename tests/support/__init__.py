"""What several test files share. Importable as ``support`` (pyproject puts tests/ on the path)."""
