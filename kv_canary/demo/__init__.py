"""The demo: a real engine serves real text with the canary on, first healthy, then with one planted fault at a time."""
