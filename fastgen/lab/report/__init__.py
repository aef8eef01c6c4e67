"""Reports of runs: tables, pictures, and one HTML file."""
