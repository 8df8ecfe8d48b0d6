"""Workers of one party's own cluster, which hold its rows and add them up; other parties see nothing of it."""
