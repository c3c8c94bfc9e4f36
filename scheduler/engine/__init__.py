"""The engine process: its loop, its entry point, its flight recorder."""
