// The page is opened. A part that is shown anew has new buttons, and the browser takes the focus from one that goes.
// The button that comes in its place gets the focus, at once or later.
() => {
    let focused = null; // what has the focus, or had it until it was removed
    let place = null; // the part around it, which stays

    document.addEventListener('pointerdown', () => { focused = null; }, true);
    document.addEventListener('focusin', ({target}) => {
        focused = target;
        place = target.parentElement?.closest('.la-ask, [id]');
    });
    new MutationObserver(() => {
        if (!focused || focused.isConnected || document.activeElement !== document.body) return;
        const isLike = (one) => one.dataset.index === focused.dataset.index;
        Array.from(place?.querySelectorAll(focused.tagName) ?? []).find(isLike)?.focus({preventScroll: true});
    }).observe(document.body, {childList: true, subtree: true});
}
