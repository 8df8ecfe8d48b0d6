"""Who an organisation is, and whom it trusts."""
