"""FedXGBoost-SMM as published, which is insecure, and the attacks that show it."""
