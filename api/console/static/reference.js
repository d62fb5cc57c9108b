// Shows the description of the HTTP interface with Swagger UI. Everything is loaded from this server.
window.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("swagger-ui");
  window.SwaggerUIBundle({
    url: place.dataset.description,
    domNode: place,
    deepLinking: true,
    validatorUrl: null,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    presets: [window.SwaggerUIBundle.presets.apis],
    layout: "BaseLayout",
  });
});
