"""What latent attention does between its projections."""
