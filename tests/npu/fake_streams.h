/* Queues of the fake device: what is handed to a stream runs later, in order, in a thread of the stream. */
#ifndef FAKE_STREAMS_H
#define FAKE_STREAMS_H

/* Runs `run(argument)` once everything before it in the stream is done. Nothing after it runs if it gives a code. */
void stream_hand(void *stream, int (*run)(void *), void *argument);

/* Returns when all that was handed over is done: 0, or the code that something gave. */
int stream_wait(void *stream);

/* The same for all streams. */
int streams_wait(void);

#endif
