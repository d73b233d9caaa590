"""Command line of kosmos-mx: `check`, `bench`, `vectors`."""
