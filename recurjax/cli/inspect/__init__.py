"""`recurjax describe`, `runs` and `report`: what a model is and what runs reached."""
