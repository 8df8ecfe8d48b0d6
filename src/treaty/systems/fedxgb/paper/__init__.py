"""FedXGB's secure aggregation and prediction as published, for comparison."""
