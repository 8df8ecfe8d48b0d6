"""How the parties of a job meet: connected, waited for, their job files compared."""
