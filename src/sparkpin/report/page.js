"use strict";
for (const code of document.querySelectorAll(".commands code")) {
  const button = document.createElement("button");
  const name = () => { button.textContent = "Copy"; };
  button.type = "button";
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {  // no permission, or a page that is not secure
      getSelection().selectAllChildren(code);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Ctrl-C";
    setTimeout(name, 2000);
  });
  name();
  code.after(button);
}
