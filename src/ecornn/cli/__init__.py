"""The command line: `app` puts the commands together, one file each."""
