// What the JavaScript programs ask; the same as in asked.py.
import { text } from "node:stream/consumers";
import { z } from "zod";

const given = JSON.parse(await text(process.stdin));
export const { url, picture, caption, question } = given;
export const look = "Look.";

export const Scene = z.object({
  color: z.enum(["red", "yellow", "green"]).describe("What color is the moon?"),
  has_cross: z.boolean().describe("Is there a green cross?"),
  caption: z.string().describe(caption),
});
export const Count = z.object({ number: z.int().min(0).max(9) });

export async function refusal(asking, type) {
  try {
    return `answered: ${JSON.stringify(await asking)}`;
  } catch (error) {
    if (error instanceof type) return error.message;
    throw error;
  }
}
