"""The flags, one dataclass per theme; every flag is declared here and nowhere else."""
