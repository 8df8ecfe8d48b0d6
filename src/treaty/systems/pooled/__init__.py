"""Training on one plain table: what every federated system is compared with."""
