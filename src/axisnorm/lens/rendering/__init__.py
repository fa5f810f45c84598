"""The results as text, figures and pages. Nothing is computed here that a result does not hold."""
