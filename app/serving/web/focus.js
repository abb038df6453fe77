// The page is opened. When a part of it is updated, its buttons are replaced, and the browser drops the focus from a
// button that goes. The button that comes in its place gets the focus, at once or later.
() => {
    let focused = null; // what has the focus, or had it until it was removed
    let place = null; // the part around it, which stays

    const keyOf = ({dataset}) => dataset.index ?? dataset.action;
    const isAlone = (one) => one.tagName === 'BUTTON' && keyOf(one) === undefined; // one of Gradio's buttons, such as Ask

    document.addEventListener('pointerdown', () => { focused = null; }, true);
    document.addEventListener('focusin', ({target}) => {
        focused = target;
        place = isAlone(target) ? target.parentElement : target.parentElement?.closest('[id]');
    });
    new MutationObserver(() => {
        if (!focused || focused.isConnected || document.activeElement !== document.body) return;
        const others = isAlone(focused) ? place?.children : place?.querySelectorAll(focused.tagName);
        const like = Array.from(others ?? []).find((one) => one.tagName === focused.tagName && keyOf(one) === keyOf(focused));
        (like ?? (place?.closest('#chat-log') && document.querySelector('#chat-question textarea')))?.focus({preventScroll: true});
    }).observe(document.body, {childList: true, subtree: true});
}
