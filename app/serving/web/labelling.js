// A key or button sends the answer for the picture that is shown. Until the next picture comes, further ones are ignored:
// they would answer for a picture that nobody has seen.
const LOOK_MS = 500; // how often the page asks for the proposal of a picture that waits for one
const LATE_MS = 5000; // after this time without an answer of the server, keys count again
const OTHERS = {enter: 'accept', s: 'skip', u: 'undo', backspace: 'undo'};

let newest = 0; // the largest serial number that was shown
let answered = null; // the picture that was answered, until another one is shown
let answeredAt = 0;

const view = () => element.querySelector('.la-label');
const pictureOf = ({dataset}) => dataset.picture === '' ? null : Number(dataset.picture);
const button = (selector) => element.querySelector(`button${selector}:not(:disabled)`);

const send = (pressed) => {
    const {dataset} = view();
    if (answered === dataset.picture && Date.now() - answeredAt < LATE_MS) return;
    [answered, answeredAt] = [dataset.picture, Date.now()];
    pressed.classList.add('is-pressed');
    const isAccepted = pressed.dataset.action === 'accept';
    trigger('act', {
        action: isAccepted ? 'choose' : pressed.dataset.action,
        picture: pictureOf(view()),
        choice: Number(isAccepted ? dataset.proposal : pressed.dataset.choice),
    });
};

const look = (action) => trigger('act', {action, picture: pictureOf(view())});

setInterval(() => {
    const {picture, waits} = view()?.dataset ?? {};
    if (waits !== undefined && picture !== answered && !document.hidden) look('wait');
}, LOOK_MS);

element.addEventListener('click', ({target}) => {
    const pressed = target.closest('button[data-action]');
    if (pressed && !pressed.disabled) send(pressed);
});

document.addEventListener('keydown', (event) => {
    if (!view() || event.ctrlKey || event.altKey || event.metaKey || event.getModifierState('AltGraph') || event.repeat) return;
    // A French keyboard has digits with Shift only, and a Russian one has no Latin letters: the place of the key counts.
    const isPlain = event.shiftKey || /^[a-z\d]+$/i.test(event.key);
    const key = (isPlain ? event.key : event.code.replace(/^(Digit|Key|Numpad)/, '')).toLowerCase();
    if (event.target.closest('button, summary, input, textarea') && key === 'enter') return; // presses it
    const pressed = key in OTHERS ? button(`[data-action=${OTHERS[key]}]`) : button(`[aria-keyshortcuts="${CSS.escape(key)}"]`);
    if (!pressed) return;
    event.preventDefault();
    send(pressed);
});

watch('value', () => {
    const shown = view(), serial = Number(shown.dataset.serial);
    if (serial < newest) { // an older answer came later
        answered = null;
        look('look');
        return;
    }
    newest = serial;
    const isNew = shown.dataset.picture !== element.dataset.picture;
    if (isNew || element.querySelector('[role=alert]')) answered = null;
    element.dataset.picture = shown.dataset.picture;
    // So that Enter accepts the proposal and does not press the last button again, and the new picture is read out.
    if (isNew || document.activeElement === document.body) element.querySelector('figure').focus({preventScroll: true});
    const proposed = element.querySelector('[data-proposed]'), list = proposed?.parentElement;
    if (proposed) list.scrollTop = proposed.offsetTop - list.offsetTop - list.clientHeight / 2; // in a long list
});
