"""Names of the backends and how "auto" chooses between them."""
