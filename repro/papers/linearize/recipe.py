from ..vit3.recipe import describe_recipe
