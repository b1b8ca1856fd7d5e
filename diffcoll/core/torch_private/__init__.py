"""Private torch API that the library uses outside of its engines, each with the reason; a file for each subject."""
