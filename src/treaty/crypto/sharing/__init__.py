"""Secret sharing, and comparison and routing on shares."""
