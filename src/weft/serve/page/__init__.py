"""The page at `/`: static files, and the endpoints that only the page asks. Its code is in static/."""
